// Uses the official client unchanged: node node_client.cjs URL MODEL; prints one JSON object.
const OpenAI = require("openai");

async function main([url, model]) {
  const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "ignored", maxRetries: 0 });
  const models = (await client.models.list()).data.map((each) => each.id);
  const messages = [{ role: "user", content: "kolima 48" }];
  const asked = { model, messages, temperature: 0 };
  const answer = await client.chat.completions.create(asked);
  let streamed = "";
  for await (const chunk of await client.chat.completions.create({ ...asked, stream: true })) {
    streamed += chunk.choices[0]?.delta?.content ?? "";
  }
  const helped = await client.chat.completions.stream(asked).finalMessage();
  if (helped.content !== streamed) throw new Error("the stream helper gives another text");
  let refusal = {};
  try {
    await client.completions.create({ model: "no-such-adapter", prompt: "a" });
  } catch (error) {
    refusal = { status: error.status, code: error.code };
  }
  console.log(JSON.stringify({ models, whole: answer.choices[0].message.content, streamed, ...refusal }));
}

main(process.argv.slice(2)).catch((error) => { console.error(error); process.exit(1); });
