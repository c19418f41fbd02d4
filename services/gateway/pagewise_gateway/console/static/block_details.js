// What is known of the block that is pointed at.

import { getJson } from "./api.js";
import { count, num, percent, unitOf } from "./format.js";
import { href } from "./route.js";
import { html, useEffect, useState } from "./htm-preact.js";

const REST = 150; // ms that the pointer has to rest before the gateway is asked
const AGAIN = 2000; // ms after which it is asked again

/** `at`: {executor, tier, block, map, pinned} or null. */
export function BlockDetails({ at }) {
  const [known, setKnown] = useState(null);
  const single = at && at.map.blocks_per_cell === 1 && unitOf(at.map) === "block";
  const name = at && `${at.executor}/${at.tier}/${at.block}`;
  useEffect(() => {
    if (!single) return undefined;
    const abort = new AbortController();
    let timer = 0;
    const ask = async () => {
      const query = new URLSearchParams({ executor: at.executor, tier: at.tier, block: String(at.block) });
      try {
        setKnown({ name, block: await getJson(`/console/block?${query}`, { signal: abort.signal }) });
      } catch (error) {
        if (!abort.signal.aborted) setKnown({ name, error: error.message });
      }
      if (!abort.signal.aborted) timer = setTimeout(ask, AGAIN);
    };
    timer = setTimeout(ask, REST);
    return () => {
      abort.abort();
      clearTimeout(timer);
    };
  }, [single && name]);

  return html`<section class="panel block-details" aria-label="The block that is pointed at">
    <h2>${at ? title(at) : "Block"}</h2>
    ${at && at.pinned && html`<p class="pinned">Kept in view. Escape or another click lets it go.</p>`}
    <div aria-live="polite">
      ${!at && html`<p class="empty">Point at a block, or focus a map and use the arrow keys.</p>`}
      ${at && html`<${Shown} at=${at} single=${single} />`}
      ${single && known?.name === name && html`<${Known} ...${known} />`}
    </div>
  </section>`;
}

function title({ executor, tier, block, map }) {
  const last = Math.min(block + map.blocks_per_cell, map.num_blocks) - 1;
  const unit = unitOf(map);
  return `${executor}, ${tier}: ${last > block ? `${unit}s ${num(block)}–${num(last)}` : `${unit} ${num(block)}`}`;
}

function Shown({ at, single }) {
  const place = 2 * Math.floor((at.block - at.map.first) / at.map.blocks_per_cell);
  if (place < 0 || place >= at.map.cells.length) return html`<p>Not in what is shown.</p>`;
  const label = new Map(at.map.legend).get(at.map.cells[place]) ?? "unknown";
  if (single) return html`<p class="lead">${label}</p>`;
  return html`<p class="lead">${label}: ${percent(at.map.cells[place + 1] / 255)} of them</p>
    <p class="empty">
      ${unitOf(at.map) === "page" ? "Pages are shown in the order of the legend: which page is where, executors decide." : "Zoom in until a cell is one block to see what it holds."}
    </p>`;
}

function Known({ block, error }) {
  if (error) return html`<p class="notice bad">${error}</p>`;
  const copies = Object.entries(block.copies ?? {});
  return html`<dl class="facts">
      <dt>State</dt>
      <dd>${block.state}</dd>
      <dt>References</dt>
      <dd>${num(block.references)}${block.references > 1 ? ` (saves ${count(block.references - 1, "block")})` : ""}</dd>
      <dt>Hash</dt>
      <dd class="code">${block.hash || "none: it is not full, or not computed yet"}</dd>
      ${block.depth !== undefined && block.depth !== null && html`<dt>Depth in its prefix</dt><dd>${count(block.depth, "block")}</dd>`}
      ${block.tokens !== undefined && html`<dt>Tokens</dt><dd>${num(block.tokens)}</dd>`}
      ${block.price !== undefined && block.price !== null && html`<dt>Price of eviction</dt><dd>${priceOf(block.price)}</dd>`}
      ${block.unused_for > 0 && html`<dt>Not used for</dt><dd>${count(block.unused_for, "block")} that came in since</dd>`}
      ${block.price !== undefined && html`<dt>Why it stays or goes</dt><dd>${whyOf(block)}</dd>`}
      ${copies.length > 0 && html`<dt>Copies here</dt><dd>${copies.map(([tier, id]) => `${tier} ${id}`).join(", ")}</dd>`}
      ${block.elsewhere?.length > 0 &&
      html`<dt>Elsewhere</dt><dd>${block.elsewhere.map((each) => `${each.executor_id} ${each.tier} ${each.block}`).join(", ")}</dd>`}
      ${block.requests?.length > 0 &&
      html`<dt>Held by</dt>
        <dd>
          ${block.requests.slice(0, 8).map((id) => html`<a key=${id} class="code" href=${href("requests", { id })}>${id.slice(0, 10)}</a> `)}
          ${block.requests.length > 8 ? `and ${num(block.requests.length - 8)} more` : ""}
        </dd>`}
    </dl>
    ${block.text && html`<h3>Text</h3><pre class="block-text" tabindex="0">${block.text}</pre>`}`;
}

/** Why a block that may be evicted has its price. */
export function whyOf({ price, probability }) {
  if (probability === undefined || probability === null) return "it has not been used for the longest time";
  const saved = Number((1e6 * price).toPrecision(3));
  return `it is used again with a probability of ${Math.round(100 * probability)}%, and keeping it saves ${saved} microseconds of recovery for each block that comes in: less than keeping another one`;
}

/** What evicting a block is expected to cost: two digits are as many as it is known to. */
export function priceOf(price) {
  return typeof price === "number" ? String(Number(price.toPrecision(2))) : "–";
}
