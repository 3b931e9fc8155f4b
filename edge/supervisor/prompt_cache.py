"""Save the prompts of one engine's slots to disk, and restore them in the next engine (POST /slots/N?action=...)."""

from __future__ import annotations

import asyncio
from collections.abc import Container
from contextlib import suppress
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

from aiohttp.client_exceptions import ClientError

from edge.linux.timeouts import in_thread
from edge.plan.plan import LaunchPlan, SavedPrompts
from edge.supervisor.policy import SupervisorOptions
from edge.supervisor.prompt_files import PromptFiles, file_key
from edge.supervisor.traffic import Traffic
from edge.supervisor.warmup import WarmupRequest
from edge.supervisor.warmup_run import EngineClient, Warming

# Below, a prompt is computed in less time than its file takes to write: 512 tokens of a 1 GB model take 4 s on two
# cores, 0.1 s on an Orin.
LEAST_TOKENS = 512
MOST_TOKENS = 1 << 24  # beyond any context: no count
# Before READY. 100 MB from the page cache take 0.01 s, from an SD card 2 s; a client that waits may ask something else.
RESTORE_S = 5.0
SLOTS_TIMEOUT_S = 5.0
PREFILL_S = 600.0  # 16 000 tokens at 30 tokens/s
_MARK = "\u241f"  # stands for the user's message in the rendered chat template


def saved_prompts(client: EngineClient, plan: LaunchPlan, terms: SupervisorOptions, traffic: Traffic) -> NoPrompts:
    """Return the saved prompts of a child, as far as its plan keeps any."""
    if plan.saved_prompts is None:
        return NoPrompts()
    return PromptCache(client, plan, plan.saved_prompts, terms, traffic)


class NoPrompts:
    """The saved prompts of a child whose plan keeps none."""

    def look(self) -> None:
        """Begin to read and verify the files, while the engine loads."""

    async def restore(self) -> None:
        """Restore what `look` found; after RESTORE_S it goes on while clients are served already."""

    async def run(self, warming: Warming) -> None:
        """Restore again after the idle warm-up, which uses the slots; then save what clients leave, until cancelled."""

    async def save(self) -> None:
        """Save the slots that clients have changed."""

    def close(self, *, asked: bool) -> None:
        """Stop a restore that goes on. `asked`: the engine ends because it was asked to, not of what it reads."""


class PromptCache(NoPrompts):
    """The saved prompts of one child."""

    def __init__(
        self, client: EngineClient, plan: LaunchPlan, store: SavedPrompts, terms: SupervisorOptions, traffic: Traffic
    ) -> None:
        system_prompt = terms.system_prompt
        self.restored: dict[int, Path] = {}  # by slot
        self._files = PromptFiles(Path(store.folder), store.limit_bytes)
        self._key = file_key(store.key)
        self._pinned_key = file_key(store.key, system_prompt) if system_prompt else None
        self._system_prompt = system_prompt
        self._slots = plan.settings.n_parallel
        self._token_bytes = sum(each.kv_bytes for each in plan.budget.values()) / max(1, plan.settings.n_ctx)
        self._client = client
        self._traffic = traffic
        self._idle_s = terms.policy.save_prompts_idle_s
        self._saved_s = traffic.moved_s  # of the traffic that is saved
        self._known: dict[int, Any] = {}  # last task of each slot, saved or of the warm-up
        self._pinned: Path | None = None
        self._may_pin = self._pinned_key is not None
        self._saving = asyncio.Lock()
        self._found: asyncio.Future[dict[int, Path]] | None = None
        self._restoring: asyncio.Future[None] | None = None
        self._reading: Path | None = None

    def look(self) -> None:
        self._found = asyncio.ensure_future(in_thread(self._look, None))

    def _look(self) -> dict[int, Path]:
        """Return the file of each slot, the system prompt's first. Blocking."""
        pinned = self._files.newest(self._pinned_key, 1) if self._pinned_key else []
        self._pinned = pinned[0] if pinned else None
        newest = self._files.newest(self._key, self._slots - len(pinned))
        return dict(enumerate([*pinned, *newest]))

    async def restore(self) -> None:
        if self._found is not None and (self._restoring is None or self._restoring.done()):
            self._restoring = asyncio.ensure_future(self._restore(self._found))
            await asyncio.wait({self._restoring}, timeout=RESTORE_S)

    async def _restore(self, found: asyncio.Future[dict[int, Path]]) -> None:
        """Restore each file. One that the engine refuses is removed; one that it dies of keeps the name for that."""
        with suppress(ClientError, OSError):
            for slot, path in (await asyncio.shield(found)).items():
                name = await in_thread(partial(self._files.begin_read, path), None)
                if name is None:
                    continue
                self._reading = path
                status, _ = await self._client.post(f"/slots/{slot}?action=restore", {"filename": name})
                await in_thread(partial(self._files.end_read, path, good=status == 200), None)
                self._reading = None
                if status == 200:
                    self.restored[slot] = path
            if self.restored:
                await self._know(self.restored)

    @property
    def _came(self) -> bool:
        """Whether a client has come since this child started, or since its slots were saved."""
        return self._traffic.moved_s > self._saved_s

    async def _know(self, slots: Container[int]) -> None:
        """Note the present tasks of these slots as the warm-up's own, which are not saved, unless a client has come.

        A client that came before the idle warm-up ended has its prompt saved, with a long one of the warm-up beside it.
        """
        rows = await self._rows() or []
        if not self._came:
            tasks = {row["id"]: row["id_task"] for row in rows if not row.get("is_processing")}
            self._known |= {slot: task for slot, task in tasks.items() if slot in slots}

    def close(self, *, asked: bool) -> None:
        for work in (self._found, self._restoring):
            if work is not None:
                work.cancel()
        if asked and self._reading is not None:
            self._files.end_read(self._reading, good=True)

    async def run(self, warming: Warming) -> None:
        if self.restored and not self._came:
            await self.restore()
        await self._know(range(self._slots))
        while True:
            with suppress(ClientError, OSError):
                quiet_s = monotonic() - self._traffic.moved_s
                if not self._traffic.open and self._may_pin and self._pinned is None:
                    await self._pin(warming)
                if not self._traffic.open and quiet_s >= self._idle_s:
                    await self.save()
            await asyncio.sleep(self._idle_s)

    async def save(self) -> None:
        with suppress(ClientError, OSError):
            await self._save_changed()

    async def _save_changed(self) -> None:
        """Save each changed slot. Raises ClientError or OSError if the engine goes away."""
        async with self._saving:
            moved_s = self._traffic.moved_s
            if moved_s <= self._saved_s:
                return
            rows = await self._rows()
            if rows is None:
                return
            for row in rows:
                slot, task, tokens = row["id"], row["id_task"], row.get("n_prompt_tokens")
                if row.get("is_processing") or self._known.get(slot) == task or not isinstance(tokens, int):
                    continue
                if LEAST_TOKENS <= tokens <= MOST_TOKENS and await self._save(slot, self._key, tokens) is None:
                    continue
                self._known[slot] = task
            self._saved_s = moved_s

    async def _save(self, slot: int, key: str, tokens: int) -> Path | None:
        name = await in_thread(partial(self._files.begin_write, key, int(tokens * self._token_bytes)), None)
        if name is None:
            return None
        status, _ = await self._client.post(f"/slots/{slot}?action=save", {"filename": name})
        # Not a file where it failed: the engine may have written a part of it.
        return await in_thread(partial(self._files.keep, name), None) if status == 200 else None

    async def _pin(self, warming: Warming) -> None:
        """Compute the system prompt in slot 0 while no client is here, and save it."""
        messages = [{"role": "system", "content": self._system_prompt}, {"role": "user", "content": _MARK}]
        status, answer = await self._client.post("/apply-template", {"messages": messages})
        text = answer.get("prompt") if status == 200 and isinstance(answer, dict) else None
        self._may_pin = isinstance(text, str) and _MARK in text  # else this engine or this template cannot
        if not self._may_pin:
            return
        body = {"prompt": str(text).split(_MARK)[0], "n_predict": 1, "cache_prompt": True, "id_slot": 0}
        request = WarmupRequest("/completion", body, "the system prompt")
        began_s = self._traffic.moved_s
        if await warming.while_idle(request, PREFILL_S, self._traffic) is None:
            self._may_pin = self._traffic.moved_s > began_s  # a client came; otherwise the engine refused
            return
        rows = {row["id"]: row for row in await self._rows() or ()}
        tokens = rows.get(0, {}).get("n_prompt_tokens")
        if isinstance(tokens, int) and LEAST_TOKENS <= tokens <= MOST_TOKENS and self._pinned_key is not None:
            self._pinned = await self._save(0, self._pinned_key, tokens)
        self._may_pin = False
        self._known[0] = rows.get(0, {}).get("id_task")

    async def _rows(self) -> list[dict[str, Any]] | None:
        """Return the slots that had a task, none from an engine that reports no tasks; None without an answer."""
        rows = await self._client.get("/slots", SLOTS_TIMEOUT_S)
        if not isinstance(rows, list):
            return None
        known = [row for row in rows if isinstance(row, dict) and row.get("id_task") is not None]
        return [row for row in known if isinstance(row.get("id"), int) and row["id"] >= 0]
