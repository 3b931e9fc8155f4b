from __future__ import annotations

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge.gateway.routes import Kind, plain_path, route


@pytest.mark.parametrize(
    ("method", "target", "kind", "name"),
    [
        ("GET", "/", Kind.OURS, "/"),
        ("GET", "/healthz?verbose", Kind.OURS, "/healthz"),
        ("GET", "/readyz/chat", Kind.OURS, "/readyz/{id}"),
        ("GET", "/v1/models/a%2Fb", Kind.OURS, "/v1/models/{id}"),
        ("POST", "/models", Kind.HELD, "other"),
        ("POST", "/models/load", Kind.HELD, "other"),
        ("GET", "/v1/api/tags", Kind.OURS, "/api"),
        ("GET", "/api", Kind.OURS, "/api"),
        ("POST", "/v1/chat/completions", Kind.HELD, "/v1/chat/completions"),
        ("GET", "/apix", Kind.HELD, "other"),
        ("GET", "//livez", Kind.OURS, "/livez"),
        ("GET", "//v1/models", Kind.OURS, "/v1/models"),
        ("GET", "/v1/models/", Kind.OURS, "/v1/models"),
        ("POST", "//upstream/chat/tools", Kind.REFUSED, "refused"),
        ("GET", "/api/v0/models", Kind.OURS, "/api/v0/models"),
        ("GET", "/api/v0/models/a/b", Kind.OURS, "/api/v0/models/{id}"),
        ("GET", "/api/v1/models", Kind.OURS, "/v1/models"),
        ("POST", "/api/v1/chat/completions", Kind.HELD, "/v1/chat/completions"),
        ("POST", "/api/v0/embeddings", Kind.HELD, "/v1/embeddings"),
        ("GET", "/props", Kind.HELD, "/props"),
        ("POST", "/props", Kind.ADMIN, "/props"),
        ("POST", "/slots/0?action=save", Kind.ADMIN, "/slots"),
        ("GET", "/slots", Kind.HELD, "/slots"),
        ("POST", "/lora-adapters", Kind.ADMIN, "/lora-adapters"),
        ("POST", "/upstream/chat/slots/1?action=erase", Kind.ADMIN, "/slots"),
        ("GET", "/upstream/chat/metrics", Kind.HELD, "other"),
        ("GET", "/upstream/chat/tools", Kind.REFUSED, "refused"),
        ("GET", "http://127.0.0.1:80/tools", Kind.REFUSED, "refused"),
        ("GET", "/upstream/chat", Kind.BAD, "bad"),
        ("GET", "/upstream//props", Kind.BAD, "bad"),
        ("GET", "/x/../upstream/chat/props", Kind.BAD, "bad"),
        ("GET", "/%75pstream/chat/props", Kind.BAD, "bad"),
        ("OPTIONS", "*", Kind.BAD, "bad"),
        ("GET", "/%ff", Kind.BAD, "bad"),
        ("GET", "/a%00b", Kind.BAD, "bad"),
    ],
)
def test_the_route_table(method: str, target: str, kind: Kind, name: str) -> None:
    found = route(method, target)
    assert (found.kind, found.name) == (kind, name)


def test_by_id_carries_the_model_and_what_the_engine_gets() -> None:
    found = route("GET", "/upstream/a%2Fb%20c/v1/x%2Fy?z=%2F")
    assert (found.model, found.target) == ("a/b c", "/v1/x%2Fy?z=%2F")


@pytest.mark.parametrize(
    ("target", "sent"),
    [
        ("//v1/chat/completions", "/v1/chat/completions"),
        ("/v1//chat/completions?a=//b", "/v1/chat/completions?a=//b"),
        ("/v1/chat/completions/", "/v1/chat/completions"),
        ("/./v1/x/../chat/completions", "/v1/chat/completions"),
        ("/v1/chat/completion%73", "/v1/chat/completion%73"),
        ("/%2Fv1/a%20b%25", "/v1/a%20b%25"),
        ("/upstream/chat//v1/chat/completions/", "/v1/chat/completions"),
        ("//upstream/chat/", "/"),
        ("/api/v1//chat/completions?x=%20", "/v1/chat/completions?x=%20"),
        ("/v1/x+y;a=b:c@d", "/v1/x+y;a=b:c@d"),
    ],
)
def test_a_path_is_sent_as_it_was_classified(target: str, sent: str) -> None:
    found = route("POST", target)
    assert (found.target, found.kind) == (sent, Kind.HELD)


@given(st.text(string.printable, max_size=60))
def test_the_engine_gets_the_path_that_the_rules_saw(text: str) -> None:
    found = route("POST", "/" + text)
    if found.target and found.model is None:
        again = route("POST", found.target)
        assert (again.kind, again.name, again.target) == (found.kind, found.name, found.target)
        assert "//" not in found.target.split("?")[0].split("#")[0]


def test_work_takes_a_slot_and_looking_does_not() -> None:
    assert route("POST", "/v1/chat/completions").slot
    assert route("POST", "/something/new").slot
    assert not route("GET", "/props").slot
    assert not route("POST", "/tokenize").slot
    assert not route("POST", "/v1/messages/count_tokens").slot


SPELLINGS = st.sampled_from(["/tools", "/cors-proxy"]).flatmap(
    lambda path: st.tuples(
        st.lists(st.booleans(), min_size=len(path), max_size=len(path)),
        st.sampled_from(["", "/", "//", "/./", "/x/../"]),
        st.sampled_from(["", "/", "//", "/.", "?url=x", "#x", "/sub"]),
        st.sampled_from(["", "http://localhost", "/upstream/chat"]),
    ).map(lambda parts: (path, *parts))
)


@given(SPELLINGS, st.sampled_from(["GET", "POST", "HEAD", "PUT", "OPTIONS"]))
def test_no_spelling_of_a_refused_route_is_passed_on(
    spelling: tuple[str, list[bool], str, str, str], method: str
) -> None:
    path, escaped, before, after, prefix = spelling
    written = "".join(f"%{ord(c):02X}" if escape and c != "/" else c for c, escape in zip(path, escaped, strict=True))
    target = prefix + (before.rstrip("/") if before else "") + written + after
    assert route(method, target).kind in (Kind.REFUSED, Kind.BAD), target


@given(st.text(string.printable, max_size=60))
def test_any_target_gets_an_answer_and_a_name_of_a_closed_set(target: str) -> None:
    found = route("POST", target)
    assert len(found.name) < 40
    assert target not in found.name or target in ("/", "") or found.name != "other"


@given(st.text(max_size=40))
def test_a_plain_path_is_absolute_and_has_no_dots(text: str) -> None:
    plain = plain_path("/" + text)
    if plain is not None:
        assert plain.startswith("/")
        assert ".." not in plain.split("/")
