"""Which model does a request name? Only asked where the answer matters. Pure."""

from __future__ import annotations

import json
import re
from urllib.parse import parse_qs

from edge.gateway.openai import Fault
from edge.gateway.refused import Refused

_FORM_FIELD = re.compile(rb'name="?model"?[^\r\n]*\r\n(?:[^\r\n]+\r\n)*\r\n([^\r\n]{1,1024})\r\n', re.IGNORECASE)


def named_model(body: bytes | None, content_type: str, target: str) -> str | None:
    """From the JSON body, the form or the query. None where none is named. Raises Refused on a body that is no JSON."""
    query = target.partition("?")[2].partition("#")[0]
    asked = parse_qs(query).get("model") if query else None
    if asked:
        return asked[0]
    if not body:
        return None
    if content_type.startswith("multipart/"):
        field = _FORM_FIELD.search(body)
        return field[1].decode("utf-8", "replace") if field else None
    try:
        document = json.loads(body)
    except (ValueError, RecursionError) as error:
        message = "the request body is not JSON" if isinstance(error, ValueError) else "the body is nested too deeply"
        raise Refused(Fault(400, "bad_json", message, "send a JSON object in UTF-8", param="body")) from None
    model = document.get("model") if isinstance(document, dict) else None
    return model if isinstance(model, str) else None
