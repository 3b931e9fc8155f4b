"""Compare the catalogue with what its hub has today: `python -m tests.bench.catalogue [NAME…] [--json]`

For every quantization of profiles/models.toml with a hub as source: whether the repository and the files are there, and
whether revision, size and SHA-256 are those of the row. One listing a repository is asked, no file is fetched.
HF_ENDPOINT names a mirror. Exit code 1 where a row contradicts the hub; figures that a row lacks are printed, to be
written down.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache

from edge.errors import EdgeError
from edge.models.catalogue import CatalogueFile, CatalogueQuant, CatalogueRow, load
from edge.models.hub import Listing, Site, list_repo
from edge.models.job import ResumableError
from edge.models.quant import label_from_name
from edge.models.source import HubSource, parse
from edge.models.transfer import make_client
from tests.bench.rows import bench_parser


@dataclass(frozen=True)
class Finding:
    """One quantization against the hub. `verdict`: same | differs | gone | unknown (asked in vain) | incomplete."""

    row: str
    quant: str
    verdict: str
    what: str = ""


def judge(row: CatalogueRow, quant: CatalogueQuant, listing: Listing, source: HubSource) -> Finding:
    """Compare one quantization with the listing of its repository."""
    there = {file.path: file for file in listing.files}
    said: list[str] = []
    missing: list[str] = []
    for file in quant.files:
        found = there.get(file.path) or next((one for path, one in there.items() if _ends(path, file, quant)), None)
        if found is None:
            return Finding(row.name, quant.quant, "gone", f"{file.path} is not in {listing.repo}")
        for name, ours, theirs in (("bytes", file.bytes, found.bytes), ("sha256", file.sha256, found.sha256)):
            if ours is None and theirs is not None:
                missing.append(f"{name} = {theirs}")
            elif ours is not None and theirs is not None and ours != theirs:
                said.append(f"{file.path}: {name} {ours} here, {theirs} there")
        if file.bytes is None and file.approx_bytes and found.bytes and _far(file.approx_bytes, found.bytes):
            said.append(f"{file.path}: about {file.approx_bytes} here, {found.bytes} there")
    if said:
        return Finding(row.name, quant.quant, "differs", "; ".join(said))
    if source.revision is None:
        missing.append(f"revision = {listing.commit}")
    return Finding(row.name, quant.quant, "incomplete" if missing else "same", ", ".join(missing))


def _ends(path: str, file: CatalogueFile, quant: CatalogueQuant) -> bool:
    """Return whether a row that knows only the end of the name means this file."""
    return file.sha256 is None and path.endswith(file.path) and label_from_name(path) == quant.quant


def _far(rounded: int, exact: int) -> bool:
    return abs(rounded - exact) > 0.06 * exact  # GB and GiB differ by 7 %, which is the error that this finds


def check(rows: Sequence[CatalogueRow], env: Mapping[str, str]) -> Iterator[Finding]:
    """Ask each repository once. What the network does not answer is unknown, not wrong."""
    with make_client() as client:

        @cache
        def listed(source: HubSource) -> Listing | EdgeError:
            try:
                return list_repo(source, Site(source.site, None, env), client, sleep=lambda _: None)
            except EdgeError as error:
                return error

        for row in rows:
            for quant in row.quants:
                source = parse(quant.source)
                if not isinstance(source, HubSource):
                    continue
                answer = listed(HubSource(source.repo, revision=source.revision, site=source.site))
                if isinstance(answer, Listing):
                    yield judge(row, quant, answer, source)
                else:
                    vain = isinstance(answer, ResumableError)
                    yield Finding(row.name, quant.quant, "unknown" if vain else "gone", str(answer))


def main() -> int:
    parser = bench_parser(__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="of rows; all without one")
    arguments = parser.parse_args()
    wanted = {name.lower() for name in arguments.names}
    findings = list(check([row for row in load() if not wanted or row.name.lower() in wanted], os.environ))
    if arguments.json:
        print(json.dumps({"schema": 1, "findings": [asdict(each) for each in findings]}))
    else:
        for each in findings:
            print(f"{each.verdict:<10} {each.row}:{each.quant}  {each.what}".rstrip())
        print(", ".join(f"{count} {verdict}" for verdict, count in Counter(each.verdict for each in findings).items()))
    return int(any(each.verdict in ("differs", "gone") for each in findings))


if __name__ == "__main__":
    sys.exit(main())
