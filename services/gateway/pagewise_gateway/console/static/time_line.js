// The time line of a request: waiting, recovery and prefill, tokens, preemptions, and on which executor it was.

import { count, num, seconds } from "./format.js";
import { href } from "./route.js";
import { html } from "./htm-preact.js";

const LOSSES = ["preempted", "started over"]; // kinds of events in which a sequence loses its blocks

/** `report`: of /debug/requests. `live`: of the stream, if it is there. Times are in seconds since the arrival. */
export function TimeLine({ report, live }) {
  const age = report.arrived_seconds_ago;
  const events = eventsOf(report, age);
  const end = Math.max(age - (report.ended_seconds_ago ?? 0), 1e-6);
  const spans = spansOf(report, events, end);
  const at = (time) => `${(100 * Math.max(0, Math.min(time, end))) / end}%`;
  const wide = (from, to) => `${Math.max(0.3, (100 * (Math.min(to, end) - from)) / end)}%`;
  return html`<section class="time-line">
    <h3>Time line <small>${seconds(end)} ${isNumber(report.ended_seconds_ago) ? "from its arrival to its end" : "since it arrived"}</small></h3>
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
        ${placesOf(report, age, end).map(
          ({ name, from, to }) =>
            html`<span key=${`${name}${from}`} class="place" style=${{ left: at(from), width: wide(from, to) }} title=${name}><b>${name}</b></span>`,
        )}
      </div>
      <div class="axis">${[0, 0.25, 0.5, 0.75, 1].map((share) => html`<span key=${share}>${seconds(end * share)}</span>`)}</div>
    </div>
    <ol class="events">
      ${sentences(report, events, live).map(
        ({ time, text, by, rest }) => html`<li key=${text + (rest ?? "")}>
          <span class="time">${time === undefined ? "" : seconds(time)}</span>${text}
          ${by && html`<a class="code" href=${href("requests", { id: by })}>${by}</a>`}${rest}
        </li>`,
      )}
    </ol>
  </section>`;
}

function eventsOf(report, age) {
  return report.sequences
    .flatMap((sequence) => (sequence.history ?? []).map((event) => ({ ...event, output: sequence.index, time: Math.max(0, age - event.seconds_ago) })))
    .sort((a, b) => a.time - b.time);
}

const isNumber = (value) => typeof value === "number";

function spansOf(report, events, end) {
  const queue = report.queue_seconds ?? end;
  const first = report.first_token_seconds ?? end;
  const spans = [{ kind: "waiting", from: 0, to: queue, title: "waiting" }];
  if (!isNumber(report.queue_seconds)) return spans;
  const started = events.find(({ kind, actual_seconds: took }) => kind === "started" && took > 0);
  const recovered = started ? Math.min(queue + started.actual_seconds, first) : queue;
  if (recovered > queue) spans.push({ kind: "recovery", from: queue, to: recovered, title: "recovery" });
  spans.push({ kind: "prefill", from: recovered, to: first, title: "prefill" });
  spans.push(...chunksOf(report, recovered, first));
  if (first < end) spans.push({ kind: "decode", from: first, to: end, title: "tokens" });
  for (const [index, event] of events.entries()) {
    if (!LOSSES.includes(event.kind)) continue;
    const back = events.slice(index).find(({ kind, output }) => kind === "resumed" && output === event.output);
    spans.push({ kind: "preempted", from: event.time, to: back?.time ?? end, title: event.kind });
  }
  return spans.filter(({ from, to }) => to > from);
}

/** The chunks in which it was prefilled, drawn over the prefill: each lasts until the next one was planned. */
function chunksOf(report, from, first) {
  const chunks = (report.chunks ?? []).map(({ seconds_ago: ago, tokens }) => ({ tokens, time: Math.max(from, report.arrived_seconds_ago - ago) }));
  const before = chunks.filter(({ time }) => time < first);
  if (before.length < 2) return [];
  return before.map(({ time, tokens }, index) => ({
    kind: index % 2 ? "chunk odd" : "chunk",
    from: time,
    to: before[index + 1]?.time ?? first,
    title: `chunk of ${num(tokens)} tokens`,
  }));
}

function placesOf(report, age, end) {
  const places = report.executors ?? [];
  return places.map(({ executor_id: name, seconds_ago: ago }, index) => ({
    name,
    from: Math.max(0, age - ago),
    to: index + 1 < places.length ? age - places[index + 1].seconds_ago : end,
  }));
}

function sentences(report, events, live) {
  const found = [{ time: 0, text: "It arrived." }];
  const places = report.executors ?? [];
  const age = report.arrived_seconds_ago;
  places.forEach(({ executor_id: name, seconds_ago: ago }, index) => {
    const from = index ? ` It moved there from ${places[index - 1].executor_id}.` : "";
    found.push({ time: Math.max(0, age - ago), text: `It was placed on ${name}.${from}` });
  });
  for (const event of events) {
    const output = report.sequences.length > 1 ? `Output ${event.output + 1}: ` : "";
    const { text, ...others } = LOSSES.includes(event.kind) ? lossOf(event) : { text: startOf(event) };
    found.push({ time: event.time, text: output + text, ...others });
  }
  if (isNumber(report.first_token_seconds))
    found.push({ time: report.first_token_seconds, text: "The first token was there." });
  found.sort((a, b) => a.time - b.time);
  const reasons = report.sequences.map(({ finish_reason: reason }) => reason).filter(Boolean);
  const tokens = report.sequences.reduce((sum, each) => sum + each.num_output_tokens, 0);
  if (reasons.length) found.push({ text: `It ended (${[...new Set(reasons)].join(", ")}) with ${num(tokens)} tokens.` });
  else if (live || tokens) found.push({ text: `It has ${num(tokens)} tokens so far.` });
  return found;
}

/** The sentence of a preemption in up to three parts; the one in the middle is the request that it was for. */
function lossOf({ kind, reason, blocks, freed, by }) {
  const what = kind === "preempted" ? "It was preempted" : "It started over";
  const rest = ` (${reason}): it let go of ${count(blocks, "block")}, ${num(freed)} of which became free.`;
  return by ? { text: `${what} for request `, by, rest } : { text: what + rest };
}

function startOf(event) {
  const { kind, method, device_tokens: device, loaded_tokens: loaded, source, peer } = event;
  const begin = kind === "resumed" ? "It resumed" : "It started";
  const parts = [];
  if (device) parts.push(`${num(device)} tokens were on the device`);
  if (loaded) parts.push(`${num(loaded)} tokens were in ${source}${peer ? ` of ${peer}` : ""}`);
  const how = { load: "loaded", recompute: "computed again", both: "computed from the front and loaded from the back" }[method] ?? method;
  if (loaded && how) parts.push(`these were ${how}`);
  const predicted = event.predicted_seconds?.[method];
  const took = event.actual_seconds;
  if (predicted !== undefined && took) parts.push(`predicted ${seconds(predicted)}, took ${seconds(took)}`);
  return `${begin}${parts.length ? `: ${parts.join(", ")}` : " with nothing from the cache"}.`;
}
