// Server-sent events read through fetch(), because EventSource cannot send an API key.

const LONGEST_EVENT = 16 * 1024 * 1024;

/**
 * Call `onEvent(name, data)` for every event of a body until it ends. `data` is text.
 * `onBytes` is called whenever something comes, comments included.
 */
export async function readEvents(body, onEvent, onBytes = () => {}) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    onBytes();
    rest += value;
    if (rest.includes("\r")) rest = rest.replaceAll("\r\n", "\n");
    let end;
    while ((end = rest.indexOf("\n\n")) >= 0) {
      deliver(rest.slice(0, end), onEvent);
      rest = rest.slice(end + 2);
    }
    if (rest.length > LONGEST_EVENT) throw new Error("an event has no end");
  }
}

function deliver(block, onEvent) {
  let name = "message";
  const data = [];
  for (const line of block.split("\n")) {
    if (line.startsWith("event:")) name = line.slice(6).trim();
    else if (line.startsWith("data:")) data.push(line.slice(line[5] === " " ? 6 : 5));
  }
  if (data.length) onEvent(name, data.join("\n"));
}
