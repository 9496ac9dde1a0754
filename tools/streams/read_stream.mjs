// Reads streams with a client of JavaScript and prints each message as a line of JSON, {"error": TEXT} if it fails.
//
//     node read_stream.mjs PAGE CLIENT PATH URL COUNT
//
// It is copied to where the clients are installed. PAGE is the script of the daemon's page for talking. A message is
// all that the client made of the stream.

import { readFileSync } from "node:fs";

const [page, client, path, url, count] = process.argv.slice(2);
const CHAT = "/v1/chat/completions", COMPLETIONS = "/v1/completions", RESPONSES = "/v1/responses";
const MESSAGES = "/v1/messages", OLLAMA_CHAT = "/api/chat", OLLAMA_GENERATE = "/api/generate", INFILL = "/infill";
const model = "model", apiKey = "none", prompt = "Name three rivers.";
const messages = [{ role: "user", content: prompt }];

const all = async (items) => {
  const read = [];
  for await (const item of items) read.push(item);
  return read;
};
const texts = (chunks, ...kinds) => ({ texts: kinds.map((kind) => chunks.map((one) => kind(one) ?? "").join("")), chunks });
const post = () => fetch(url + path, { method: "POST", headers: { "content-type": "application/json" }, body: "{}" });

async function openai() {
  const { default: OpenAI } = await import("openai");
  const api = new OpenAI({ baseURL: `${url}/v1`, apiKey, maxRetries: 0 });
  return {
    [CHAT]: () => api.chat.completions.stream({ model, messages }).finalChatCompletion(),
    [COMPLETIONS]: async () =>
      texts(await all(await api.completions.create({ model, prompt, stream: true })), (chunk) => chunk.choices[0]?.text),
    [RESPONSES]: () => api.responses.stream({ model, input: prompt }).finalResponse(),
  };
}

async function anthropic() {
  const { default: Anthropic } = await import("@anthropic-ai/sdk");
  const api = new Anthropic({ baseURL: url, apiKey, maxRetries: 0 });
  return { [MESSAGES]: () => api.messages.stream({ model, max_tokens: 1000, messages }).finalMessage() };
}

async function ollama() {
  const { Ollama } = await import("ollama");
  const api = new Ollama({ host: url });
  return {
    [OLLAMA_CHAT]: async () =>
      texts(await all(await api.chat({ model, messages, stream: true })),
        (chunk) => chunk.message.content, (chunk) => chunk.message.thinking),
    [OLLAMA_GENERATE]: async () =>
      texts(await all(await api.generate({ model, prompt, stream: true })),
        (chunk) => chunk.response, (chunk) => chunk.thinking),
  };
}

async function ai() {
  const { jsonSchema, streamText, tool } = await import("ai");
  const { createOpenAICompatible } = await import("@ai-sdk/openai-compatible");
  const { createOpenAI } = await import("@ai-sdk/openai");
  const { createAnthropic } = await import("@ai-sdk/anthropic");
  const inputSchema = jsonSchema({ type: "object" });
  const tools = { read: tool({ inputSchema }), write: tool({ inputSchema }) };
  const read = (languageModel) => async () => {
    const errors = [];
    const reply = streamText({ model: languageModel, prompt, tools, maxRetries: 0, onError: ({ error }) => errors.push(error) });
    const parts = (await all(reply.fullStream)).map((part) => part.type);
    if (errors.length) throw errors[0];
    return {
      parts,
      text: await reply.text,
      thought: await reply.reasoningText,
      calls: await reply.toolCalls,
      reason: await reply.finishReason,
      usage: await reply.usage,
    };
  };
  const baseURL = `${url}/v1`;
  return {
    [CHAT]: read(createOpenAICompatible({ name: "own", baseURL, apiKey })(model)),
    [RESPONSES]: read(createOpenAI({ baseURL, apiKey }).responses(model)),
    [MESSAGES]: read(createAnthropic({ baseURL, apiKey })(model)),
  };
}

async function eventsourceParser() {
  const { EventSourceParserStream } = await import("eventsource-parser/stream");
  const read = async () =>
    all((await post()).body.pipeThrough(new TextDecoderStream()).pipeThrough(new EventSourceParserStream()));
  return Object.fromEntries([CHAT, COMPLETIONS, RESPONSES, MESSAGES, INFILL].map((route) => [route, read]));
}

// The function with which the page /chat reads a stream, taken out of its script.
async function talkPage() {
  const [written] = readFileSync(page, "utf8").match(/^async function\* eventsOf[^]*?^}/m);
  const eventsOf = new Function(`${written}; return eventsOf;`)();
  return { [CHAT]: async () => all(eventsOf(await post())) };
}

const CLIENTS = { openai, "@anthropic-ai/sdk": anthropic, ollama, ai, "eventsource-parser": eventsourceParser,
  "the page /chat": talkPage };

const ask = (await CLIENTS[client]())[path];
for (let left = Number(count); left > 0; left--) {
  let message;
  try {
    message = await ask();
  } catch (error) {
    message = { error: String(error) };
  }
  console.log(JSON.stringify(message));
}
