// The official `openai` package from npm against the server at process.argv[2]; prints as JSON what came back.

import OpenAI from "openai";

const client = new OpenAI({ baseURL: `${process.argv[2]}/v1`, apiKey: "none", maxRetries: 0 });
const messages = [
  { role: "system", content: "Be brief." },
  { role: "user", content: "What is a page table?" },
];
const greedy = { model: "tiny", temperature: 0, max_tokens: 12 };
const logprobs = { logprobs: true, top_logprobs: 3 };

async function streamed(request) {
  const chunks = [];
  for await (const chunk of await request) chunks.push(chunk);
  return chunks;
}

async function failure(request) {
  try {
    await request;
  } catch (error) {
    const { status, type, param, code, message } = error;
    return { class: error.constructor.name, status, type, param, code, message };
  }
  return null;
}

async function abortedChunks(count) {
  const stream = await client.completions.create({
    model: "tiny", prompt: "on and on", max_tokens: 2000, stream: true, ignore_eos: true,
  });
  let seen = 0;
  for await (const _ of stream) {
    if (++seen === count) stream.controller.abort();
  }
  return seen;
}

const prompt = "A prompt of the npm client, long enough for some blocks of sixteen tokens, whatever they hold: ".repeat(2);
const usage = { stream: true, stream_options: { include_usage: true } };

console.log(JSON.stringify({
  models: (await client.models.list()).data,
  model: await client.models.retrieve("tiny"),
  chat: await client.chat.completions.create({ messages, ...greedy, ...logprobs }),
  chatStream: await streamed(client.chat.completions.create({ messages, ...greedy, ...logprobs, ...usage })),
  // The helper puts a stream together again, and checks the order of what comes.
  chatHelper: await client.chat.completions.stream({ messages, ...greedy }).finalChatCompletion(),
  completions: [
    await client.completions.create({ prompt, logprobs: 2, ...greedy }),
    await client.completions.create({ prompt, logprobs: 2, ...greedy }),
  ],
  completionStream: await streamed(client.completions.create({ prompt, logprobs: 2, ...greedy, ...usage })),
  aborted: await abortedChunks(3),
  errors: {
    model: await failure(client.completions.create({ model: "gpt-4", prompt: "x" })),
    range: await failure(client.chat.completions.create({ messages, ...greedy, top_p: 5 })),
    length: await failure(client.completions.create({ model: "tiny", prompt: Array(3000).fill(5) })),
    stream: await failure(client.completions.create({ prompt: "x", ...greedy, best_of: 3, ...usage })),
  },
}));
