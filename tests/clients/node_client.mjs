import Anthropic from "@anthropic-ai/sdk";
import { Ollama } from "ollama";
import OpenAI from "openai";

const { BASE, KEY } = process.env;
const model = "chat";
const client = new OpenAI({ baseURL: BASE + "/v1", apiKey: KEY, maxRetries: 0 });
const anthropic = new Anthropic({ baseURL: BASE, apiKey: KEY, maxRetries: 0 });
const messages = [{ role: "user", content: "Say hello." }];
const person = {
  type: "object",
  properties: { name: { type: "string", maxLength: 12 }, age: { type: "integer" } },
  required: ["name", "age"],
  additionalProperties: false,
};
const weather = {
  name: "get_weather",
  parameters: { type: "object", properties: { city: { type: "string", maxLength: 12 } }, required: ["city"] },
};
const talk = ["London", "Rome", "Berlin"].flatMap((city) => [
  { role: "user", content: `Weather in ${city}?` },
  {
    role: "assistant",
    content: null,
    tool_calls: [
      { id: "call_" + city, type: "function", function: { name: "get_weather", arguments: JSON.stringify({ city }) } },
    ],
  },
  { role: "tool", tool_call_id: "call_" + city, content: "sunny" },
]);

async function check(name, what) {
  const began = Date.now();
  let ok = true;
  let seen;
  try {
    seen = await what();
  } catch (error) {
    ok = false;
    seen = String(error);
  }
  const line = { check: name, ok, took_s: (Date.now() - began) / 1000, seen: String(JSON.stringify(seen)).slice(0, 300) };
  console.log(JSON.stringify(line));
}
const ask = (more) => client.chat.completions.create({ model, messages, max_tokens: 16, temperature: 0, ...more });

await check("models.list", async () => (await client.models.list()).data.map((each) => each.id));
await check("chat", async () => (await ask({})).choices[0].message.content);
await check("stream", async () => {
  let text = "";
  for await (const chunk of await ask({ stream: true })) text += chunk.choices[0]?.delta?.content ?? "";
  if (!text) throw new Error("empty");
  return text;
});
await check("json schema", async () => {
  const format = { type: "json_schema", json_schema: { name: "person", schema: person, strict: true } };
  return JSON.parse((await ask({ max_tokens: 80, response_format: format })).choices[0].message.content);
});
await check("tools", async () => {
  const asked = [...talk, { role: "user", content: "Weather in Paris?" }];
  const tools = [{ type: "function", function: weather }];
  const answer = await ask({ messages: asked, max_tokens: 120, tools, tool_choice: "required" });
  return answer.choices[0].message.tool_calls[0].function;
});
await check("responses, stream", async () => {
  const kinds = new Set();
  const stream = await client.responses.create({ model, input: "Say hello.", max_output_tokens: 16, stream: true });
  for await (const event of stream) kinds.add(event.type);
  return [...kinds];
});
await check("embeddings", async () => {
  const answer = await client.embeddings.create({ model: "emb", input: ["a", "b"] });
  return answer.data.map((each) => each.embedding.length);
});
await check("a stream left early frees the slot for the next", async () => {
  const control = new AbortController();
  try {
    const more = { max_tokens: 3000, stream: true, ignore_eos: true };
    const stream = await client.chat.completions.create({ model, messages, ...more }, { signal: control.signal });
    for await (const _ of stream) control.abort();
  } catch {}
  return (await ask({ max_tokens: 1 })).choices[0].finish_reason;
});
await check("anthropic messages", async () => {
  return (await anthropic.messages.create({ model, max_tokens: 16, temperature: 0, messages })).content[0].text;
});
await check("anthropic stream", async () => {
  return (await anthropic.messages.stream({ model, max_tokens: 16, temperature: 0, messages }).finalMessage()).content[0].text;
});
await check("error: an unknown model is a 404", async () => {
  try {
    await ask({ model: "nope" });
  } catch (error) {
    if (error instanceof OpenAI.NotFoundError) return error.message;
    throw error;
  }
  throw new Error("no error");
});
const ollama = new Ollama({ host: BASE, headers: { Authorization: "Bearer " + KEY } });
const few = { num_predict: 8, temperature: 0 };
await check("ollama: list and show", async () => {
  const names = (await ollama.list()).models.map((each) => each.model);
  if (!names.includes(model)) throw new Error(names);
  return (await ollama.show({ model })).capabilities;
});
await check("ollama: chat", async () => {
  const answer = await ollama.chat({ model, messages, options: few });
  if (!answer.done || !answer.eval_count) throw new Error(JSON.stringify(answer));
  return answer.message.content;
});
await check("ollama: stream", async () => {
  const parts = [];
  for await (const part of await ollama.chat({ model, messages, options: few, stream: true })) parts.push(part);
  if (parts.length < 3 || !parts.at(-1).done) throw new Error(parts.length);
  return parts.map((part) => part.message.content).join("");
});
await check("ollama: embed", async () => (await ollama.embed({ model: "emb", input: ["a", "b"] })).embeddings.length);
await check("ollama: an unknown model is an error with a text", async () => {
  try {
    await ollama.chat({ model: "nope", messages });
  } catch (error) {
    if (error.status_code === 404 && String(error.message).includes("nope")) return error.message;
    throw error;
  }
  throw new Error("no error");
});
