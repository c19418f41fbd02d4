// Which way blocks go: between the device, host memory, storage and other executors.

import { num } from "./format.js";
import { Spark } from "./parts.js";
import { html } from "./htm-preact.js";

const SHOWN = [
  ["copied", "Copied on write", "device", "device", "A sequence writes into a block that others share, so it gets a copy."],
  ["evicted", "Evicted", "device", "free", "Cached blocks that left the device, because their room was needed."],
  ["demoted", "Demoted", "device", "host", "Evicted blocks that were copied to host memory, because they are worth it."],
  ["loaded", "Loaded", "host", "device", "Blocks that came back from host memory instead of being computed."],
  ["fetched", "Fetched", "other executor", "device", "Blocks that another executor had."],
  ["written", "Written", "device", "storage", "Blocks that were written behind to the disk cache or the store."],
  ["recalled", "Recalled", "storage", "device", "Blocks that came back from the disk cache or the store."],
];

/** `executor`: whose flows; those of all without it. */
export function Flows({ store, executor }) {
  const live = new Map(
    (store.fleet?.executors ?? [])
      .filter(({ executor_id: name }) => !executor || name === executor)
      .map((each) => [each.executor_id, each.rates ?? {}]),
  );
  const storage = ["written", "recalled"].some((flow) => store.lastMinute(flow, executor) > 0);
  const shown = SHOWN.filter(([flow]) => storage || (flow !== "written" && flow !== "recalled"));
  return html`<section class="panel flows" aria-label="Where blocks go">
    <h2>Where blocks go <small>in the last minute${executor ? `, ${executor}` : ""}</small></h2>
    <ul>
      ${shown.map(([flow, name, from, to, hint]) => {
        const rate = [...live.values()].reduce((sum, rates) => sum + (rates[flow] ?? 0), 0);
        const total = store.lastMinute(flow, executor);
        return html`<li key=${flow} class=${`flow ${flow}${rate > 0 ? " moving" : ""}${total < 0.5 ? " still" : ""}`} title=${hint}>
          <span class="name">${name}</span>
          <span class="way">
            <span class="end">${from}</span><span class="arrow" aria-hidden="true"></span><span class="hidden"> to </span
            ><span class="end">${to}</span>
          </span>
          <span class="total">${num(Math.round(total))}</span>
          <span class="rate">${num(rate)}/s</span>
          <${Spark} values=${store.perSecond(flow, executor)} />
        </li>`;
      })}
    </ul>
  </section>`;
}
