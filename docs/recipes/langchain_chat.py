"""Ask edgellm through LangChain: a streamed answer, then one in the shape of a class.

pip install langchain-openai
EDGELLM_URL=http://box:8080/v1 EDGELLM_API_KEY=sk-edge-… python langchain_chat.py
"""

from __future__ import annotations

import os

from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

model = ChatOpenAI(
    base_url=os.environ.get("EDGELLM_URL", "http://127.0.0.1:8080/v1"),
    api_key=os.environ.get("EDGELLM_API_KEY", "none"),
    model=os.environ.get("EDGELLM_MODEL", "chat"),
    temperature=0,
    max_tokens=200,
    # A model that is still loading holds the request: up to gateway.hold.seconds.
    timeout=900,
)


class City(BaseModel):
    """A city and its country."""

    name: str = Field(max_length=20)
    country: str = Field(max_length=20)


for chunk in model.stream("Name one city in France."):
    print(chunk.content, end="", flush=True)
print()
# json_schema: llama.cpp holds the model to the schema with a grammar, so that any model's answer can be parsed.
print(model.with_structured_output(City, method="json_schema").invoke("Paris is a city in France. Describe it."))
