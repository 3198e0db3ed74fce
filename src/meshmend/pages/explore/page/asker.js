// Asks the server: each answer is a stream of JSON lines, and closing the stream ends the task.

export async function getJson(path) {
  const response = await fetch(path);
  if (!response.ok) throw new Error(`The server answers ${response.status}.`);
  return response.json();
}

export async function* ask(path, question, signal) {
  const response = await fetch(path, { method: "POST", body: JSON.stringify(question), signal });
  if (!response.ok) {
    const answer = await response.json().catch(() => ({ why: `It answers ${response.status}.` }));
    yield { kind: "error", why: answer.why };
    return;
  }
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    text += value;
    const parts = text.split("\n");
    text = parts.pop();
    for (const part of parts) if (part) yield JSON.parse(part);
  }
}

// The one answer of a kind, or an error.
export async function askOnce(path, question, kind, signal) {
  for await (const answer of ask(path, question, signal)) {
    if (answer.kind === kind) return answer;
    if (answer.kind === "error") throw new Error(answer.why);
  }
  throw new Error("The server gave no answer; ask again.");
}
