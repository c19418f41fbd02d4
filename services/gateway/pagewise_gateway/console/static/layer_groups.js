// The pages of models with several groups of layers: which kind of layers has them, and what becomes of snapshots.

import { num } from "./format.js";
import { Bar, Table } from "./parts.js";
import { html } from "./htm-preact.js";

const EVENTS = [
  ["snapshots_taken", "taken", "Windows or states at the ends of prompts and answers, and where prompts part"],
  ["snapshots_used", "used", "Sequences that began at one"],
  ["snapshots_unused", "evicted unused", "Evicted before any sequence began at them, and kept by no tier"],
  ["snapshots_skipped", "skipped", "Places that took none, because other memory was worth more"],
  ["snapshots_demoted", "demoted", "Went to host memory when the device evicted them"],
  ["snapshots_loaded", "loaded", "Came from another tier or executor for a sequence"],
];

/** The name of a group: its kind, and the tokens of a window or chunk. */
export const nameOf = ({ kind, window: size }) => (kind === "window" || kind === "chunk" ? `${kind} ${num(size)}` : kind);

/** `executor`: whose groups; those of all without it. Nothing where no model has several groups. */
export function LayerGroups({ store, executor }) {
  const executors = (store.fleet?.executors ?? []).filter(({ executor_id: name }) => !executor || name === executor);
  const rows = executors.flatMap(({ executor_id: name, device, tiers = {} }) =>
    [["device", device], ...Object.entries(tiers)]
      .filter(([, tier]) => tier.groups?.length)
      .map(([tier, { groups, num_blocks: total }]) => ({ name, tier, groups, total })),
  );
  if (!rows.length) return null;
  return html`<section class="panel groups" aria-label="Pages by layers">
    <h2>Pages by layers</h2>
    <${Table} label="Pages of each group of layers" head=${["Executor", "Tier", "Share", "Layers: pages in use, cached", "Snapshots"]}>
      ${rows.map(
        ({ name, tier, groups, total }) => html`<tr key=${`${name}/${tier}`}>
          <th scope="row">${name}</th>
          <td>${tier}</td>
          <td class="share"><${Bar} label=${`Pages of ${name}, ${tier}`} total=${total} parts=${groups.flatMap(partsOf)} /></td>
          <td>${groups.map((one) => `${nameOf(one)}: ${num(one.in_use)}, ${num(one.cached)}`).join("; ")}</td>
          <td>${groups.filter(({ window: size }) => size).map((one) => `${nameOf(one)}: ${num(one.snapshots)}`).join("; ")}</td>
        </tr>`,
      )}
    <//>
    <p class="events">
      Snapshots in the last minute:
      ${EVENTS.map(([counter, words, hint]) => html` <span key=${counter} title=${hint}>${num(Math.round(store.lastMinute(counter, executor) || 0))} ${words}</span>`)}
    </p>
  </section>`;
}

function partsOf(group) {
  const name = nameOf(group);
  return [
    { label: `${name} in use`, value: group.in_use, className: `kind-${group.kind}` },
    { label: `${name} cached`, value: group.cached, className: `kind-${group.kind} pale` },
  ];
}
