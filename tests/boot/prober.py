"""A client inside a board's network. Stands alone: run by path, prints JSON.

    prober.py once METHOD PATH TIMEOUT [BODY]   one exchange
    prober.py watch [PORT]                      until stdin ends: connects again and again, and chats without a pause

`watch` prints when the first connection was accepted (monotonic seconds), how many were refused before and after, and
each chat as [began, ended, status or error].
"""

from __future__ import annotations

import http.client
import json
import socket
import sys
import threading
import time
from typing import Any

HOST, PORT = "127.0.0.1", 8080
CHAT = json.dumps({"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1})


def exchange(method: str, path: str, timeout: float, body: str | None, port: int = PORT) -> dict[str, Any]:
    connection = http.client.HTTPConnection(HOST, port, timeout=timeout)
    try:
        headers = {"Content-Type": "application/json"} if body is not None else {}
        connection.request(method, path, body, headers)
        response = connection.getresponse()
        return {"status": response.status, "body": response.read().decode()}
    except OSError as error:
        return {"error": type(error).__name__}
    except http.client.HTTPException as error:
        return {"error": type(error).__name__}
    finally:
        connection.close()


class Watch:
    def __init__(self, port: int, pause_s: float = 0.1) -> None:
        self.port = port
        self.pause_s = pause_s  # between connections, once one was accepted
        self.over = False
        self.accepted_s: float | None = None
        self.refused: list[float] = []
        self.refused_before = 0
        self.chats: list[list[Any]] = []

    def connect(self) -> None:
        while not self.over:
            began = time.monotonic()
            try:
                with socket.create_connection((HOST, self.port), timeout=10):
                    self.accepted_s = self.accepted_s or time.monotonic()
            except ConnectionRefusedError:
                if self.accepted_s is not None:
                    self.refused.append(began)
                else:
                    self.refused_before += 1
            except OSError:
                pass  # the network is not up yet
            # A gateway bounds open connections: a flood of ours would crowd out the chat.
            time.sleep(self.pause_s if self.accepted_s else 0.02)

    def chat(self) -> None:
        while not self.over:
            if self.accepted_s is None:
                time.sleep(0.005)
                continue
            began = time.monotonic()
            answer = exchange("POST", "/v1/chat/completions", 120, CHAT, self.port)
            self.chats.append([began, time.monotonic(), answer.get("status") or answer["error"]])
            good = sum(chat[2] == 200 for chat in self.chats)
            if good <= 1 or self.chats[-1][2] != 200:
                print(json.dumps({"chat": self.chats[-1]}), flush=True)
            time.sleep(0.02 if self.chats[-1][2] == 200 else 0.1)


def watch(port: int) -> None:
    one = Watch(port)
    threads = [threading.Thread(target=work, daemon=True) for work in (one.connect, one.chat)]
    for thread in threads:
        thread.start()
    sys.stdin.read()
    one.over = True
    threads[0].join(15)
    refused = {"refused": one.refused, "refused_before": one.refused_before}
    print(json.dumps({"accepted_s": one.accepted_s, **refused, "chats": one.chats}), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "once":
        print(json.dumps(exchange(sys.argv[2], sys.argv[3], float(sys.argv[4]), sys.argv[5] if sys.argv[5:] else None)))
    else:
        watch(int(sys.argv[2]) if sys.argv[2:] else PORT)
