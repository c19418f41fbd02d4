// The time line of a request: waiting, recovery and prefill, tokens, preemptions, and on which executor it was.

import { num, seconds } from "./format.js";
import { html } from "./htm-preact.js";

const LOSSES = ["preempted", "started over"]; // kinds of events in which a sequence loses its blocks

/** `report`: of /debug/explain. Times are in seconds since the arrival. */
export function TimeLine({ report }) {
  const events = report.events ?? [];
  const end = Math.max(report.total_seconds, 1e-6);
  const spans = spansOf(report, events, end);
  const at = (time) => `${(100 * Math.max(0, Math.min(time, end))) / end}%`;
  const wide = (from, to) => `${Math.max(0.3, (100 * (Math.min(to, end) - from)) / end)}%`;
  return html`<section class="time-line">
    <h3>Time line <small>${seconds(end)} ${report.state === "ended" ? "from its arrival to its end" : "since it arrived"}</small></h3>
    <div class="lanes" aria-hidden="true">
      <div class="lane">
        ${spans.map(
          ({ kind, from, to, title }) =>
            html`<span key=${`${kind}${from}`} class=${kind} style=${{ left: at(from), width: wide(from, to) }} title=${`${title}: ${seconds(to - from)}`}
              ><b>${(to - from) / end > 0.12 ? title : ""}</b></span
            >`,
        )}
        ${isNumber(report.first_token_seconds) &&
        html`<i class="first" style=${{ left: at(report.first_token_seconds) }} title="first token"></i>`}
      </div>
      <div class="lane places">
        ${placesOf(report, end).map(
          ({ name, from, to }) =>
            html`<span key=${`${name}${from}`} class="place" style=${{ left: at(from), width: wide(from, to) }} title=${name}><b>${name}</b></span>`,
        )}
      </div>
      <div class="axis">${[0, 0.25, 0.5, 0.75, 1].map((share) => html`<span key=${share}>${seconds(end * share)}</span>`)}</div>
    </div>
  </section>`;
}

const isNumber = (value) => typeof value === "number";

function spansOf(report, events, end) {
  const queue = report.queue_seconds ?? end;
  const first = report.first_token_seconds ?? end;
  const spans = [{ kind: "waiting", from: 0, to: queue, title: "waiting" }];
  if (!isNumber(report.queue_seconds)) return spans;
  const started = events.find(({ kind, method, seconds: took }) => kind === "started" && method !== "device" && took > 0);
  const recovered = started ? Math.min(queue + started.seconds, first) : queue;
  if (recovered > queue) spans.push({ kind: "recovery", from: queue, to: recovered, title: "recovery" });
  spans.push({ kind: "prefill", from: recovered, to: first, title: "prefill" });
  spans.push(...chunksOf(report, recovered, first));
  if (first < end) spans.push({ kind: "decode", from: first, to: end, title: "tokens" });
  for (const { kind, at, seconds: away } of events) {
    if (LOSSES.includes(kind)) spans.push({ kind: "preempted", from: at, to: isNumber(away) ? at + away : end, title: kind });
  }
  return spans.filter(({ from, to }) => to > from);
}

/** The chunks in which it was prefilled, drawn over the prefill: each lasts until the next one was planned. */
function chunksOf(report, from, first) {
  const chunks = (report.chunks ?? []).map(({ at, tokens }) => ({ tokens, time: Math.max(from, at) }));
  const before = chunks.filter(({ time }) => time < first);
  if (before.length < 2) return [];
  return before.map(({ time, tokens }, index) => ({
    kind: index % 2 ? "chunk odd" : "chunk",
    from: time,
    to: before[index + 1]?.time ?? first,
    title: `chunk of ${num(tokens)} tokens`,
  }));
}

function placesOf({ executors: places }, end) {
  return places.map(({ executor_id: name, at }, index) => ({ name, from: at, to: places[index + 1]?.at ?? end }));
}
