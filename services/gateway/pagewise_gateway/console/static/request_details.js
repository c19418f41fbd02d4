// One request: where its time went in sentences, its time line, and a button that aborts it.

import { getJson, post } from "./api.js";
import { num, seconds } from "./format.js";
import { Empty, State } from "./parts.js";
import { href } from "./route.js";
import { TimeLine } from "./time_line.js";
import { html, useEffect, useState } from "./htm-preact.js";

const AGAIN = 1500; // ms after which it is asked for again

/** `live`: what the stream says about it, undefined if it is not among what is sent. */
export function RequestDetails({ id, live }) {
  const [known, setKnown] = useState(null);
  const [error, setError] = useState("");
  const ended = Boolean(live?.finish_reason) || known?.state === "ended";
  useEffect(() => {
    const abort = new AbortController();
    let timer = 0;
    const ask = async () => {
      try {
        const report = await getJson(`/debug/explain/${encodeURIComponent(id)}?limit=200`, { signal: abort.signal });
        setKnown(report);
        setError("");
        if (report.state !== "ended") timer = setTimeout(ask, AGAIN);
      } catch (failure) {
        if (!abort.signal.aborted) setError(failure.message);
      }
    };
    ask();
    return () => {
      abort.abort();
      clearTimeout(timer);
    };
  }, [id, ended]);

  const status = live?.status ?? known?.status;
  return html`<article class="panel request" aria-label="The request that was found">
    <div class="request-title">
      <h2>Request <span class="code">${id}</span></h2>
      ${status && html`<${State} value=${ended ? "ended" : status} />`}
      ${known && !ended && html`<${Abort} id=${known.request_id} />`}
      <a class="button quiet" href=${href("requests")}>Close</a>
    </div>
    ${error && html`<p class="notice bad" role="alert">${error}</p>`}
    ${!known && !error && html`<${Empty}>Looking for it.<//>`}
    ${known &&
    html`<section class="why"><h3>Where its time went</h3><ul>${known.sentences.map((each) => html`<li key=${each}>${linked(each, known.request_id)}</li>`)}</ul></section>`}
    ${known && html`<${TimeLine} report=${known} />`}
    ${known && html`<${Facts} report=${known} />`}
  </article>`;
}

/** A sentence in which the ids of other requests are links. */
function linked(sentence, own) {
  return sentence
    .split(/\b([0-9a-f]{32})\b/)
    .map((part, index) => (index % 2 && part !== own ? html`<a class="code" href=${href("requests", { id: part })}>${part}</a>` : part));
}

function Facts({ report }) {
  const outputs = report.sequences.length;
  const cached = Object.entries(report.cached_tokens ?? {}).filter(([, tokens]) => tokens > 0);
  return html`<dl class="facts row">
    <dt>Prompt</dt>
    <dd>${num(report.prompt_tokens)} tokens</dd>
    <dt>From the cache</dt>
    <dd>${cached.map(([tier, tokens]) => `${num(tokens)} from ${tier}`).join(", ") || "nothing"}</dd>
    <dt>Output</dt>
    <dd>${num(report.output_tokens)} tokens${outputs > 1 ? ` in ${num(outputs)} outputs` : ""}</dd>
    <dt>Blocks</dt>
    <dd>${num(report.blocks)}, ${num(report.shared_blocks)} of them shared</dd>
    <dt>Waited</dt>
    <dd>${seconds(report.queue_seconds)}</dd>
    <dt>First token after</dt>
    <dd>${seconds(report.first_token_seconds)}</dd>
    ${report.key && html`<dt>Key</dt><dd>${report.key}</dd>`}
  </dl>`;
}

function Abort({ id }) {
  const [asked, setAsked] = useState(false);
  const [said, setSaid] = useState("");
  const abort = async () => {
    setAsked(false);
    try {
      await post(`/console/requests/${encodeURIComponent(id)}/abort`);
      setSaid("It is being aborted.");
    } catch (error) {
      setSaid(error.message);
    }
  };
  if (said) return html`<span role="status">${said}</span>`;
  if (!asked) return html`<button type="button" onClick=${() => setAsked(true)}>Abort…</button>`;
  return html`<span role="group" aria-label="Abort this request?" class="confirm">
    Its client gets what was generated so far, with the finish reason abort, where its API has one.
    <button type="button" class="danger" onClick=${abort}>Abort it</button>
    <button type="button" onClick=${() => setAsked(false)}>Keep it</button>
  </span>`;
}
