// One request: its time line, what is told about it in sentences, and its end if it shall have one.

import { getJson, post } from "./api.js";
import { num, seconds } from "./format.js";
import { Empty, State } from "./parts.js";
import { href } from "./route.js";
import { TimeLine } from "./time_line.js";
import { html, useEffect, useState } from "./htm-preact.js";

const AGAIN = 1500; // ms after which it is asked again what a request has
const WHY_AGAIN = 3000; // and where its time went: that is more to find out

/** `live`: what the stream says about it, undefined if it is not among what is sent. */
export function RequestDetails({ id, live }) {
  const [known, setKnown] = useState(null);
  const [error, setError] = useState("");
  const [why, setWhy] = useState(null);
  const ended = Boolean(live?.finish_reason) || isOver(known);
  useEffect(() => {
    const abort = new AbortController();
    let timer = 0;
    const ask = async () => {
      try {
        const report = await getJson(`/debug/requests/${encodeURIComponent(id)}?limit=200`, { signal: abort.signal });
        setKnown({ ...report, at: performance.now() });
        setError("");
        if (!isOver(report)) timer = setTimeout(ask, AGAIN);
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
  useEffect(() => {
    const abort = new AbortController();
    let timer = 0;
    const ask = async () => {
      try {
        setWhy(await getJson(`/debug/explain/${encodeURIComponent(id)}`, { signal: abort.signal }));
      } catch (failure) {
        if (failure.status === 404) return; // nobody knows it, or the server does not explain
      }
      if (!ended && !abort.signal.aborted) timer = setTimeout(ask, WHY_AGAIN);
    };
    ask();
    return () => {
      abort.abort();
      clearTimeout(timer);
    };
  }, [id, ended]);

  const status = live?.status ?? known?.sequences?.[0]?.status;
  return html`<article class="panel request" aria-label="The request that was found">
    <div class="request-title">
      <h2>Request <span class="code">${id}</span></h2>
      ${status && html`<${State} value=${ended ? "ended" : status} />`}
      ${known && !ended && html`<${Abort} id=${known.request_id} />`}
      <a class="button quiet" href=${href("requests")}>Close</a>
    </div>
    ${error && html`<p class="notice bad" role="alert">${error}</p>`}
    ${!known && !error && html`<${Empty}>Looking for it.<//>`}
    ${why?.sentences?.length > 0 &&
    html`<section class="why"><h3>Where its time went</h3><ul>${why.sentences.map((each) => html`<li key=${each}>${each}</li>`)}</ul></section>`}
    ${known && html`<${TimeLine} report=${known} live=${live} />`}
    ${known && html`<${Facts} report=${known} />`}
  </article>`;
}

function isOver(report) {
  return Boolean(report?.sequences?.length) && report.sequences.every(({ status, finish_reason: reason }) => reason || status === "finished");
}

function Facts({ report }) {
  const outputs = report.sequences.length;
  const sum = (field) => report.sequences.reduce((all, each) => all + (each[field] ?? 0), 0);
  const cached = Object.entries(report.cached_tokens ?? {}).filter(([, tokens]) => tokens > 0);
  return html`<dl class="facts row">
    <dt>Prompt</dt>
    <dd>${num(report.sequences[0]?.num_prompt_tokens)} tokens</dd>
    <dt>From the cache</dt>
    <dd>${cached.map(([tier, tokens]) => `${num(tokens)} from ${tier}`).join(", ") || "nothing"}</dd>
    <dt>Output</dt>
    <dd>${num(sum("num_output_tokens"))} tokens${outputs > 1 ? ` in ${num(outputs)} outputs` : ""}</dd>
    <dt>Blocks</dt>
    <dd>${num(sum("num_blocks"))}, ${num(sum("shared"))} of them shared</dd>
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
