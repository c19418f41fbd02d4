// The memory map: every executor's pools as maps of blocks, and what happens to them.

import { BlockDetails } from "./block_details.js";
import { captions, pools } from "./captions.js";
import { Flows } from "./flows.js";
import { bytes, count, num, percent, unitOf } from "./format.js";
import { LayerGroups } from "./layer_groups.js";
import { Legend } from "./legend.js";
import { MapCanvas, summaryOf } from "./map_canvas.js";
import { cellsFor, zoomed } from "./map_layout.js";
import { MapSummary } from "./map_summary.js";
import { Bar, Empty, Fact, hitsOf, Spark, State } from "./parts.js";
import { go } from "./route.js";
import { html, useState } from "./htm-preact.js";

const COLOURS = [
  ["state", "State"],
  ["request", "Request"],
  ["prefix", "Prefix"],
  ["age", "Age"],
  ["tier", "Tier"],
  ["group", "Layers"],
];

const TIER_HEIGHT = 520;

const titleOf = (colour) => (colour === "group" ? "Pages by layers" : `Blocks by ${colour}`);

/** The query of the stream for this view. */
export function memoryQuery(params) {
  const query = new URLSearchParams({ parts: "fleet,requests,map" });
  if (!params.executor) return query;
  query.set("executor", params.executor);
  query.set("colour", params.colour || "state");
  query.set("tier", params.tier || "device");
  query.set("cells", String(cellsFor(Math.max(320, innerWidth - 400), TIER_HEIGHT)));
  if (params.count) {
    query.set("first", params.first || "0");
    query.set("count", params.count);
  }
  return query;
}

export function MemoryView({ store, params }) {
  const [at, setAt] = useState(null);
  const executors = store.fleet?.executors ?? [];
  const only = params.executor;
  const maps = shownMaps(store, params, executors);
  const counts = (params.colour || "state") === "state" && sumOf(maps);
  const current = at && maps.find(({ executor_id: name, tier }) => name === at.executor && tier === at.tier);
  return html`
    <${Captions} store=${store} />
    <${Numbers} store=${store} />
    <${Controls} params=${params} executors=${executors} maps=${maps} at=${at} />
    <div class=${`map-area${only ? " one" : ""}`}>
      <div class="maps">
        ${maps.map(
          (map) => html`<${OneMap}
            key=${`${map.executor_id}/${map.tier}`}
            map=${map}
            height=${heightOf(maps.length, params)}
            executor=${executors.find(({ executor_id: name }) => name === map.executor_id) ?? {}}
            params=${params}
            at=${current ? at : null}
            setAt=${setAt}
          />`,
        )}
        ${!maps.length && html`<div class="panel"><${Empty}>${nothing(store, only, executors)}<//></div>`}
        ${!only && [...store.gone].map(([name]) => html`<${GoneMap} key=${name} name=${name} />`)}
      </div>
      <aside>
        <${Legend} maps=${maps} counts=${counts} title=${titleOf(params.colour || "state")} />
        <${BlockDetails} at=${current ? { ...at, map: current } : null} />
      </aside>
    </div>
    <${LayerGroups} store=${store} executor=${only} />
    <${Flows} store=${store} executor=${only} />
    <${MapSummary} maps=${maps} executors=${executors} />
    <p id="map-keys" class="hidden">
      Arrow keys move between blocks, plus and minus zoom, page up and page down move the view, zero shows the whole pool, Enter keeps a
      block in view, Escape goes back.
    </p>
  `;
}

function shownMaps(store, params, executors) {
  const order = new Map(executors.map(({ executor_id: name }, index) => [name, index]));
  const tiers = (params.tier || "device").split(",");
  return [...store.maps.values()]
    .filter(({ executor_id: name, tier }) => order.has(name) && (params.executor ? name === params.executor && tiers.includes(tier) : tier === "device"))
    .filter(({ colour }) => colour === (params.colour || "state"))
    .sort((a, b) => order.get(a.executor_id) - order.get(b.executor_id) || tiers.indexOf(a.tier) - tiers.indexOf(b.tier));
}

function nothing(store, only, executors) {
  if (store.problems.map) return `${title(store.problems.map)}.`;
  if (!store.fleet) return "Waiting for the first update.";
  if (only && !executors.some(({ executor_id: name }) => name === only)) return `There is no executor ${only} now.`;
  return executors.length ? "Waiting for the map." : "No executor has joined: there is no memory to show.";
}

/** Blocks of whole tiers by state; null where maps do not tell. */
function sumOf(maps) {
  if (!maps.every(({ counts }) => counts)) return null;
  const sum = {};
  for (const { counts } of maps) {
    for (const [state, blocks] of Object.entries(counts)) sum[state] = (sum[state] ?? 0) + blocks;
  }
  return sum;
}

function Captions({ store }) {
  const [first, ...others] = captions(store);
  return html`<section class="captions" aria-label="What happens">
    <div class=${`caption ${first.tone}`}>
      <p class="title">${first.title}</p>
      ${first.text && html`<p>${first.text}</p>`}
    </div>
    ${others.length > 0 &&
    html`<ul>
      ${others.slice(0, 3).map(({ tone, title, text }) => html`<li key=${title} class=${tone}><b>${title}</b>${text && ` ${text}`}</li>`)}
    </ul>`}
  </section>`;
}

function Numbers({ store }) {
  const { fleet } = store;
  if (!fleet) return null;
  const { scheduler } = fleet;
  const { total, free, cached, inUse, saved, savedBytes, unit } = pools(fleet);
  const hits = hitsOf(scheduler);
  const hit = hits.reduce((sum, { value }) => sum + value, 0);
  return html`<dl class="numbers">
    <${Fact} name="Tokens per second" value=${num(scheduler.tokens_per_second)} hint="Generated tokens of all requests">
      <${Spark} values=${store.tokens} />
    <//>
    <${Fact} name="Requests" value=${num(scheduler.requests_running)} hint="Running now">
      <small>running, ${num(scheduler.requests_waiting)} waiting</small>
      <${Spark} values=${store.running} />
    <//>
    <${Fact} name="Prompt tokens from cache" value=${percent(hit)} hint="Of the last minute, by where they were found">
      <${Bar} label="Found in" total=${1} parts=${hits} />
    <//>
    <${Fact} name=${`Device ${unit}s in use`} value=${percent(total ? inUse / total : 0)}>
      <small>${num(inUse)} of ${num(total)}</small>
      <${Bar}
        label=${`Device ${unit}s`}
        total=${total}
        parts=${[
          { label: "in use", value: inUse, className: "in-use" },
          { label: "cached", value: cached, className: "cached" },
          { label: "free", value: free, className: "free" },
        ]}
      />
    <//>
    <${Fact} name="Saved by sharing" value=${num(saved)} hint="What would be needed more if nobody shared">
      <small>${unit}s${savedBytes ? `, ${bytes(savedBytes)}` : ""}</small>
    <//>
  </dl>`;
}

function Controls({ params, executors, maps, at }) {
  const { colour = "state", executor = "" } = params;
  const show = (changed) => go("memory", { ...params, ...changed });
  const tiers = Object.keys(executors.find(({ executor_id: name }) => name === executor)?.tiers ?? {});
  const [map] = maps;
  const zoom = (factor) => {
    const view = viewOf(map, params);
    const middle = at && at.block >= view.first && at.block < view.first + view.count ? at.block : view.first + view.count / 2;
    showView(params, map, zoomed(view, map.num_blocks, middle, factor));
  };
  return html`<div class="controls" role="group" aria-label="What the map shows">
    <label>Executor
      <select value=${executor} onChange=${(event) => show({ executor: event.target.value, tier: "", first: "", count: "" })}>
        <option value="">All executors</option>
        ${executors.map(({ executor_id: name }) => html`<option key=${name} value=${name}>${name}</option>`)}
        ${executor && !executors.some(({ executor_id: name }) => name === executor) && html`<option value=${executor}>${executor}</option>`}
      </select>
    </label>
    ${executor &&
    tiers.length > 0 &&
    html`<${Choice}
      name="Tier"
      value=${params.tier || "device"}
      options=${[["device", "Device"], ...tiers.map((tier) => [tier, title(tier)]), [`device,${tiers[0]}`, "Both"]]}
      choose=${(tier) => show({ tier, first: "", count: "" })}
    />`}
    <${Choice} name="Colour" value=${colour} options=${COLOURS} choose=${(value) => show(coloured(value, executor || executors[0]?.executor_id))} />
    ${executor &&
    map &&
    html`<div class="zoom" role="group" aria-label="Zoom">
      <button type="button" onClick=${() => zoom(2)} aria-label="Zoom out" disabled=${!params.count}>−</button>
      <button type="button" onClick=${() => zoom(0.5)} aria-label="Zoom in">+</button>
      <button type="button" onClick=${() => show({ first: "", count: "" })} disabled=${!params.count}>Whole pool</button>
    </div>`}
  </div>`;
}

function Choice({ name, value, options, choose }) {
  return html`<fieldset class="choice">
    <legend>${name}</legend>
    ${options.map(
      ([option, text]) =>
        html`<label key=${option}>
          <input type="radio" name=${`choice-${name}`} checked=${option === value} onChange=${() => choose(option)} /><span>${text}</span>
        </label>`,
    )}
  </fieldset>`;
}

/** Colours other than those of states are of one executor. */
const coloured = (value, executor) => (value === "state" ? { colour: "" } : { colour: value, executor });

/** The most pixels of each map, so that all of them and what happens are seen at once. */
function heightOf(maps, { executor, tier = "" }) {
  if (executor) return tier.includes(",") ? TIER_HEIGHT / 2 : TIER_HEIGHT;
  return maps === 1 ? 420 : maps === 2 ? 320 : maps <= 4 ? 210 : 150;
}

const title = (word) => word[0].toUpperCase() + word.slice(1);

function viewOf(map, params) {
  if (!params.count || params.executor !== map.executor_id) return { first: 0, count: map.num_blocks };
  const size = Math.max(1, Math.min(Number(params.count) || map.num_blocks, map.num_blocks));
  return { first: Math.max(0, Math.min(Number(params.first) || 0, map.num_blocks - size)), count: size };
}

function showView(params, map, view) {
  const whole = !view || view.count >= map.num_blocks;
  const zoom = whole ? { first: "", count: "" } : { first: view.first, count: view.count };
  go("memory", { ...params, executor: map.executor_id, tier: params.executor ? params.tier : "", ...zoom }, Boolean(params.executor));
}

function OneMap({ map, height, executor, params, at, setAt }) {
  const [changes, setChanges] = useState({});
  const view = viewOf(map, params);
  const mine = at && at.executor === map.executor_id && at.tier === map.tier;
  const several = (params.tier || "").includes(",");
  const point = (block) => {
    if (at?.pinned) return;
    setAt(block < 0 ? null : { executor: map.executor_id, tier: map.tier, block, pinned: false });
  };
  const pin = (block) => {
    if (block < 0) return;
    if (!params.executor && map.blocks_per_cell > 1) showView(params, map, null);
    else setAt({ executor: map.executor_id, tier: map.tier, block, pinned: !(mine && at.pinned && at.block === block) });
  };
  const leave = () => {
    if (at?.pinned) setAt({ ...at, pinned: false });
    else if (params.count) showView(params, map, null);
    else if (params.executor) go("memory", { ...params, executor: "", tier: "" });
  };
  const move = (block) => setAt({ executor: map.executor_id, tier: map.tier, block, pinned: false });
  return html`<article class="panel map" aria-label=${`${map.executor_id}, ${map.tier}`}>
    <${MapTitle} map=${map} executor=${executor} params=${params} view=${view} />
    <${MapCanvas}
      map=${map}
      view=${view}
      height=${height}
      cursor=${mine ? at.block : -1}
      summary=${summaryOf(map, executor)}
      free=${Boolean(params.executor) && !several}
      onPoint=${(block) => (document.activeElement?.classList.contains("map-frame") && block >= 0 ? move(block) : point(block))}
      onPin=${pin}
      onView=${(next) => !several && showView(params, map, next)}
      onLeave=${leave}
      onChanges=${setChanges}
    />
    <${Changes} map=${map} changes=${changes} />
  </article>`;
}

function MapTitle({ map, executor, params, view }) {
  const host = Object.entries(executor.tiers ?? {});
  const unit = unitOf(map);
  const shown = `${num(view.first)}–${num(view.first + view.count - 1)} of ${num(map.num_blocks)}`;
  const part = view.count < map.num_blocks ? `${unit}s ${shown}` : count(map.num_blocks, unit);
  const each = map.blocks_per_cell > 1 ? `, ${num(map.blocks_per_cell)} in a square` : "";
  return html`<div class="map-title">
    <h2>
      ${params.executor ? map.executor_id : html`<a href=${`#/memory?executor=${encodeURIComponent(map.executor_id)}`}>${map.executor_id}</a>`}
      <small>${map.tier}, ${part}${each}</small>
    </h2>
    <span class="map-facts">
      <${State} value=${executor.state} />
      <span>${num(executor.running)} running</span>
      <span>${num(executor.tokens_per_second)} tokens/s</span>
      ${host.map(([name, tier]) => html`<span key=${name}>${name} ${num(tier.used)}/${num(tier.num_blocks)}</span>`)}
    </span>
  </div>`;
}

const WORDS = [
  ["taken", "taken into use"],
  ["copying", "being copied"],
  ["arrived", "newly cached"],
  ["released", "released"],
  ["evicted", "evicted"],
  ["changed", "changed"],
];

/** What has changed since the picture before this one. */
function Changes({ map, changes }) {
  const parts = WORDS.filter(([kind]) => changes[kind]);
  return html`<p class="changes">
    ${parts.length
      ? parts.map(([kind, words]) => html`<span key=${kind} class=${kind}>${num(changes[kind])} ${words}</span>`)
      : html`<span class="none">no change${map.tier === "device" ? "" : ` in ${map.tier} memory`}</span>`}
  </p>`;
}

function GoneMap({ name }) {
  return html`<article class="panel map gone" aria-label=${`${name} is gone`}>
    <h2>${name} <small>is gone, and what its memory held with it</small></h2>
  </article>`;
}
