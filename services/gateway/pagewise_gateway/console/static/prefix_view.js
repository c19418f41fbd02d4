// The prefix tree: which prefixes are shared by how many, what that saves, and what would be evicted next.

import { priceOf, whyOf } from "./block_details.js";
import { bytes, count, num } from "./format.js";
import { nameOf } from "./layer_groups.js";
import { Empty, Table } from "./parts.js";
import { html, useState } from "./htm-preact.js";

const ROWS = 24; // of the drawing
const ROW = 15;

export function PrefixView({ store }) {
  const executors = store.prefixes?.executors ?? [];
  if (!executors.length) return html`<div class="panel"><${Empty}>${store.fleet ? "Waiting for the prefix trees." : "Waiting for the first update."}<//></div>`;
  const saved = executors.reduce((sum, each) => sum + (each.saved_blocks ?? 0), 0);
  const savedBytes = executors.reduce((sum, each) => sum + (each.saved_bytes ?? 0), 0);
  const runs = executors.flatMap((each) => each.runs);
  const shared = runs.filter(({ references }) => references > 1);
  const most = shared.reduce((best, run) => (run.references > (best?.references ?? 0) ? run : best), null);
  return html`
    <section class="captions" aria-label="What is shared">
      <div class=${`caption ${saved ? "busy" : "calm"}`}>
        <p class="title">
          ${saved ? `Sharing prefixes saves ${count(saved, "block")}${savedBytes ? ` (${bytes(savedBytes)})` : ""} now` : "No prefix is shared now"}
        </p>
        <p>
          ${most
            ? `The most shared prefix is held by ${num(most.references)} block tables at once.`
            : "Cached prefixes wait for prompts that begin like them."}
        </p>
      </div>
    </section>
    ${executors.map((each) => html`<${Tree} key=${each.executor_id} ...${each} />`)}
  `;
}

function Tree({ executor_id: name, runs, next_evictions: next = [], truncated }) {
  const [closed, setClosed] = useState(new Set());
  const { ordered, children } = orderOf(runs);
  const hidden = new Set();
  for (const { run } of ordered) if (hidden.has(run.parent) || closed.has(run.parent)) hidden.add(run.id);
  const toggle = (id) => {
    const changed = new Set(closed);
    if (!changed.delete(id)) changed.add(id);
    setClosed(changed);
  };
  const withText = runs.some(({ text }) => text);
  const withSnapshots = runs.some(({ snapshots }) => snapshots?.length);
  return html`<article class="panel" aria-label=${`Prefix tree of ${name}`}>
    <h2>${name} <small>${count(runs.length, "run")} of blocks without a fork${truncated ? ", the largest of them" : ""}</small></h2>
    ${runs.length ? html`<${Drawing} name=${name} ordered=${ordered} children=${children} />` : html`<${Empty}>Nothing is cached.<//>`}
    ${next.length > 0 && html`<${Evictions} next=${next} />`}
    ${runs.length > 0 &&
    html`<details>
      <summary>The tree as a table</summary>
      <${Table} label=${`Runs of ${name}`} head=${["Prefix", "Blocks", "Shared by", "Where", "Evicted next", "Price", ...(withSnapshots ? ["Snapshots behind block"] : []), ...(withText ? ["Text"] : [])]}>
        ${ordered
          .filter(({ run }) => !hidden.has(run.id))
          .slice(0, 200)
          .map(
            ({ run, level }) => html`<tr key=${run.id}>
              <th scope="row" class="branch" style=${{ paddingLeft: `${0.6 + Math.min(level, 12) * 1.1}rem` }}>
                ${children.get(run.id)?.length
                  ? html`<button type="button" class="fold" aria-expanded=${String(!closed.has(run.id))} onClick=${() => toggle(run.id)}>
                      <span aria-hidden="true">${closed.has(run.id) ? "▸" : "▾"}</span><span class="hidden">branches of </span>
                    </button>`
                  : null}
                depth ${num(run.depth)}
              </th>
              <td>${num(run.num_blocks)}</td>
              <td>${run.references > 1 ? html`<b>${num(run.references)}</b>` : num(run.references)}</td>
              <td>${tiersOf(run)}</td>
              <td>${run.next_evicted === undefined || run.next_evicted === null ? "" : `${num(run.next_evicted)}.`}</td>
              <td>${priceOf(run.price)}</td>
              ${withSnapshots && html`<td>${(run.snapshots ?? []).map(snapshotOf).join("; ")}</td>`}
              ${withText && html`<td class="code text">${run.text}</td>`}
            </tr>`,
          )}
      <//>
    </details>`}
  </article>`;
}

function snapshotOf({ depth, tier, used, ...group }) {
  return `${num(depth)}: ${nameOf(group)}, ${tier}${used ? ", used" : ""}`;
}

function tiersOf({ tiers = {}, num_blocks: blocks }) {
  const parts = Object.entries(tiers).filter(([, value]) => value > 0);
  return parts.map(([tier, value]) => (value === blocks ? tier : `${tier} ${num(value)}`)).join(", ") || "–";
}

/** Runs in the order of a tree, with their level, and their children. */
function orderOf(runs) {
  const known = new Set(runs.map(({ id }) => id));
  const children = new Map();
  for (const run of runs) {
    const parent = known.has(run.parent) && run.parent !== run.id ? run.parent : null;
    if (!children.has(parent)) children.set(parent, []);
    children.get(parent).push(run);
  }
  const ordered = [];
  const open = [...(children.get(null) ?? [])].reverse().map((run) => ({ run, level: 0 }));
  while (open.length) {
    const { run, level } = open.pop();
    ordered.push({ run, level });
    for (const child of [...(children.get(run.id) ?? [])].reverse()) open.push({ run: child, level: level + 1 });
  }
  return { ordered, children };
}

/** Each run lies behind its parent; its height is that of the branches behind it. */
function Drawing({ name, ordered, children }) {
  const rows = new Map();
  let row = 0;
  const leaves = ordered.filter(({ run }) => !children.get(run.id)?.length);
  const shown = new Set(leaves.slice(0, ROWS).map(({ run }) => run.id));
  const parents = new Map(ordered.map(({ run }) => [run.id, run]));
  for (const { run } of leaves.slice(0, ROWS)) {
    for (let up = run; up; up = parents.get(up.parent)) {
      const place = rows.get(up.id) ?? { run: up, from: row, to: row };
      place.to = row;
      rows.set(up.id, place);
    }
    row += 1;
  }
  const deepest = Math.max(...[...rows.values()].map(({ run }) => run.depth + run.num_blocks), 1);
  const scale = 1000 / deepest;
  const height = Math.max(row, 1) * ROW;
  const text = `Prefix tree of ${name}: ${count(ordered.length, "run")}, ${count(leaves.length, "end")}. The table below has all of them.`;
  return html`<figure class="tree">
    <svg viewBox=${`0 0 1000 ${height}`} preserveAspectRatio="none" role="img" aria-label=${text} style=${{ height: `${height}px` }}>
      ${[...rows.values()].map(({ run, from, to }) => {
        const begin = Math.max(run.depth - 1, 0) * scale;
        const width = Math.max(run.num_blocks * scale - 1.5, 1.5);
        return html`<rect
          key=${run.id}
          x=${begin}
          y=${from * ROW + 1}
          width=${width}
          height=${(to - from + 1) * ROW - 2}
          class=${sharedClass(run)}
        >
          <title>${hintOf(run)}</title>
        </rect>`;
      })}
      ${[...rows.values()].flatMap(({ run, from, to }) =>
        marksOf(run).map(
          ({ depth, text: hint, below }) => html`<rect
            key=${`${run.id}/${depth}`}
            class=${below ? "snapshot below" : "snapshot"}
            x=${depth * scale - 4}
            y=${from * ROW + 1}
            width="3"
            height=${(to - from + 1) * ROW - 2}
          >
            <title>${hint}</title>
          </rect>`,
        ),
      )}
    </svg>
    <figcaption>
      <span class="swatch-key s0"></span>cached, nobody uses it <span class="swatch-key s1"></span>one request <span class="swatch-key s2"></span>2–3
      <span class="swatch-key s3"></span>4–15 <span class="swatch-key s4"></span>16 or more <span class="swatch-key s5"></span>in lower tiers only
      ${ordered.some(({ run }) => run.snapshots?.length) ? html`<span class="swatch-key snapshot"></span>snapshots: prompts can begin there` : ""}
      <span class="axis">beginning of the prompt → ${num(deepest)} blocks</span>
      ${leaves.length > shown.size ? html`<span>${num(leaves.length - shown.size)} more ends are not drawn</span>` : ""}
    </figcaption>
  </figure>`;
}

/** A mark for each block of a run behind which snapshots lie; `below`: none of them on the device. */
function marksOf({ snapshots = [] }) {
  const depths = new Map();
  for (const one of snapshots) depths.set(one.depth, [...(depths.get(one.depth) ?? []), one]);
  return [...depths].map(([depth, found]) => ({
    depth,
    text: `snapshots behind block ${found.map(snapshotOf).join("; ")}`,
    below: found.every(({ tier }) => tier !== "device"),
  }));
}

function sharedClass({ references, tiers = {} }) {
  if (!references) return tiers.device ? "s0" : "s5";
  return references < 2 ? "s1" : references < 4 ? "s2" : references < 16 ? "s3" : "s4";
}

function hintOf(run) {
  const text = run.text ? `\n${run.text.slice(0, 200)}` : "";
  return `${count(run.num_blocks, "block")} at depth ${run.depth}, held by ${count(run.references, "block table")}; ${tiersOf(run)}${text}`;
}

function Evictions({ next }) {
  return html`<section class="evictions">
    <h3>Evicted next</h3>
    <ol>
      ${next.slice(0, 6).map(
        ({ block, depth, ...value }) =>
          html`<li key=${block}><b>block ${num(block)}</b> at depth ${num(depth)}, price ${priceOf(value.price)}: ${whyOf(value)}</li>`,
      )}
    </ol>
  </section>`;
}
