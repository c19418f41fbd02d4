// Try it: a small chat that shows how probable each token was, and which of the prompt came from the cache.

import { post } from "./api.js";
import { num, percent, seconds } from "./format.js";
import { readEvents } from "./sse.js";
import { href } from "./route.js";
import { html, useRef, useState } from "./htm-preact.js";

const MOST_TURNS = 20;

const FIELDS = [
  ["temperature", "Temperature", { min: 0, max: 2, step: 0.1 }, 0.7],
  ["top_p", "Top p", { min: 0.05, max: 1, step: 0.05 }, 1],
  ["max_tokens", "Most tokens", { min: 1, max: 4096, step: 1 }, 64],
  ["top_logprobs", "Alternatives", { min: 0, max: 10, step: 1 }, 5],
  ["seed", "Seed", { min: 0, max: 4294967295, step: 1 }, ""],
];

export function TryView({ store }) {
  const [turns, setTurns] = useState([]);
  const [text, setText] = useState("Write a function named read_file.");
  const [system, setSystem] = useState("");
  const [parameters, setParameters] = useState(Object.fromEntries(FIELDS.map(([name, , , value]) => [name, value])));
  const [error, setError] = useState("");
  const running = useRef(null);
  const [busy, setBusy] = useState(false);
  const model = store.fleet?.model;

  const send = async (event) => {
    event.preventDefault();
    if (busy || !model || !text.trim()) return;
    running.current = new AbortController();
    setBusy(true);
    setError("");
    const turn = { question: text, prompt: null, cached: null, tokens: [], id: "", took: null, first: null };
    const before = turns.flatMap((each) => [
      { role: "user", content: each.question },
      { role: "assistant", content: each.tokens.map(({ token }) => token).join("") },
    ]);
    const messages = [...(system ? [{ role: "system", content: system }] : []), ...before, { role: "user", content: text }];
    const show = () => setTurns([...turns, { ...turn }].slice(-MOST_TURNS));
    show();
    try {
      await chat(model, messages, parameters, turn, show, running.current.signal);
      setText("");
    } catch (failure) {
      if (!running.current.signal.aborted) setError(failure.message);
    }
    show();
    setBusy(false);
  };

  return html`
    <form class="try" onSubmit=${send}>
      <section class="panel talk" aria-label="Chat">
        <h2>Try it <small>${model ?? ""}</small></h2>
        ${turns.map((turn, index) => html`<${Turn} key=${index} turn=${turn} />`)}
        ${!turns.length && html`<p class="empty">Ask something. Every token shows how probable it was; the prompt shows what came from the cache.</p>`}
        ${error && html`<p class="notice bad" role="alert">${error}</p>`}
        <label for="question">Message</label>
        <textarea id="question" rows="3" value=${text} onInput=${(event) => setText(event.target.value)}></textarea>
        <div class="buttons">
          <button type="submit" class="main" disabled=${busy || !model}>Send</button>
          <button type="button" disabled=${!busy} onClick=${() => running.current?.abort()}>Stop</button>
          <button type="button" disabled=${busy || !turns.length} onClick=${() => setTurns([])}>New chat</button>
        </div>
      </section>
      <section class="panel parameters" aria-label="Sampling parameters">
        <h2>Parameters</h2>
        <label for="system">System prompt</label>
        <textarea id="system" rows="3" value=${system} onInput=${(event) => setSystem(event.target.value)}></textarea>
        ${FIELDS.map(
          ([name, label, limits]) => html`<label key=${name} for=${name}>${label}</label>
            <input
              id=${name}
              type="number"
              ...${limits}
              placeholder=${name === "seed" ? "random" : ""}
              value=${parameters[name]}
              onInput=${(event) => setParameters({ ...parameters, [name]: event.target.value })}
            />`,
        )}
        <${Scale} />
      </section>
    </form>
  `;
}

async function chat(model, messages, parameters, turn, show, signal) {
  const chosen = Object.fromEntries(
    Object.entries(parameters)
      .filter(([, value]) => value !== "")
      .map(([name, value]) => [name, Number(value)]),
  );
  const rendered = await (await post("/tokenize", { model, messages, return_token_strs: true }, { signal })).json();
  turn.prompt = rendered.token_strs ?? rendered.tokens.map(String);
  show();
  const began = performance.now();
  const body = { model, messages, ...chosen, logprobs: true, stream: true, stream_options: { include_usage: true } };
  const answer = await post("/v1/chat/completions", body, { signal });
  await readEvents(answer.body, (_, data) => {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Error(chunk.error.message);
    turn.id = chunk.id;
    const logprobs = chunk.choices[0]?.logprobs?.content ?? [];
    if (logprobs.length && turn.first === null) turn.first = (performance.now() - began) / 1000;
    turn.tokens.push(...logprobs);
    if (chunk.usage) turn.cached = chunk.usage.prompt_tokens_details?.cached_tokens ?? 0;
    show();
  });
  turn.took = (performance.now() - began) / 1000;
}

function Turn({ turn }) {
  return html`<article class="turn">
    ${turn.prompt && html`<${Prompt} turn=${turn} />`}
    <p class="question">${turn.question}</p>
    ${turn.tokens.length > 0 && html`<${Answer} tokens=${turn.tokens} />`}
    ${turn.took !== null &&
    html`<p class="empty">
      ${num(turn.tokens.length)} tokens, the first after ${seconds(turn.first)}, all after ${seconds(turn.took)}.
      ${" "}<a href=${href("requests", { id: turn.id })}>Its time line</a>
    </p>`}
  </article>`;
}

function Prompt({ turn }) {
  const { prompt, cached } = turn;
  const title = cached === null ? `Prompt: ${num(prompt.length)} tokens` : `Prompt: ${num(prompt.length)} tokens, ${num(cached)} of them from the cache`;
  return html`<details class="prompt" open=${prompt.length < 400}>
    <summary>${title}</summary>
    <p class="tokens">
      ${cached > 0 && html`<mark class="cached"><span class="hidden">From the cache: </span>${readable(prompt.slice(0, cached))}</mark>`}
      <span>${readable(prompt.slice(cached ?? 0))}</span>
    </p>
  </details>`;
}

/** Tokens of byte-level vocabularies write a space as Ġ and the end of a line as Ċ; others write a space as ▁. */
function readable(tokens) {
  return tokens.join("").replaceAll("Ġ", " ").replaceAll("▁", " ").replaceAll("Ċ", "⏎\n");
}

const LEVELS = [0.9, 0.6, 0.3, 0.1, 0];

/** The tokens of an answer. One of them is looked at: by pointing at it, or with the arrow keys. */
function Answer({ tokens }) {
  const [chosen, setChosen] = useState(-1);
  const move = (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1, Home: -Infinity, End: Infinity }[event.key];
    if (step === undefined) return;
    event.preventDefault();
    setChosen(Math.max(0, Math.min(tokens.length - 1, chosen + step)));
  };
  return html`<p
      class="answer"
      role="group"
      aria-label="Answer; arrow keys look at its tokens one by one"
      tabindex="0"
      onKeyDown=${move}
      onPointerLeave=${() => setChosen(-1)}
    >
      ${tokens.map(({ token, logprob }, index) => {
        const level = LEVELS.findIndex((least) => Math.exp(logprob) >= least);
        const visible = token.replaceAll("\n", "⏎\n");
        const look = () => setChosen(index);
        return html`<span key=${index} class=${`token p${level}${index === chosen ? " chosen" : ""}`} onPointerEnter=${look}>${visible}</span>`;
      })}
    </p>
    <div class="alternatives" aria-live="polite">
      ${tokens[chosen] ? html`<${Alternatives} ...${tokens[chosen]} />` : html`<p class="empty">Point at a token to see what else it could have been.</p>`}
    </div>`;
}

function Alternatives({ token, logprob, top_logprobs: others = [] }) {
  const listed = others.some((each) => each.token === token) ? others : [{ token, logprob }, ...others];
  return html`<p>Log-probability ${logprob.toFixed(3)}</p>
    <ul>
      ${listed.map(
        (each) => html`<li key=${each.token} class=${each.token === token ? "this" : ""}>
          <span class="code">${JSON.stringify(each.token)}</span>
          <span>${percent(Math.exp(each.logprob))}</span>
          <i style=${{ width: `${100 * Math.exp(each.logprob)}%` }}></i>
        </li>`,
      )}
    </ul>`;
}

function Scale() {
  return html`<p class="scale" aria-label="Colours of tokens">
    Probability: <span class="token p0">over 90%</span> <span class="token p1">over 60%</span> <span class="token p2">over 30%</span>${" "}
    <span class="token p3">over 10%</span> <span class="token p4">less</span>
  </p>`;
}
