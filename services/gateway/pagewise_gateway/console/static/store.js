// What the page knows: the newest of each event, and short histories of it. Nothing here grows with time.

import { LastMinute, Ring } from "./ring.js";

/** What can happen to blocks, as the stream names it. */
export const FLOWS = ["copied", "demoted", "loaded", "fetched", "written", "recalled", "evicted", "dropped", "stored"];

const POINTS = 120; // of a line of throughput: a minute at two updates a second
const GONE_SECONDS = 60;

export class Store {
  connection = { state: "connecting", message: "" };
  fleet = null;
  requests = null;
  prefixes = null;
  maps = new Map(); // "executor/tier" -> map
  tokens = new Ring(POINTS);
  running = new Ring(POINTS);
  executorTokens = new Map(); // executor -> Ring
  flows = new Map(); // executor -> flow -> LastMinute
  preemptions = new LastMinute();
  gone = new Map(); // executor -> {at, running, moved: Set of requests, to: Set of executors}
  restarted = 0; // when the scheduler was last seen to have started anew
  problems = {}; // part -> why it cannot be shown now
  #placed = new Map(); // request -> executor
  #seen = new Map(); // executor -> {state, running, preemptions}

  /** Take an event of the stream. */
  take(name, data) {
    if (name === "problem") this.problems[data.part] = data.message;
    else delete this.problems[name];
    if (name === "fleet") this.#takeFleet(data);
    else if (name === "requests") this.#takeRequests(data);
    else if (name === "prefixes") this.prefixes = data;
    else if (name === "map") this.#takeMap(data);
  }

  /** Forget maps, and why there were none: those of the next stream are others. */
  clearMaps() {
    this.maps.clear();
    this.problems = {};
  }

  /** The server's clock in seconds, 0 before the first update. */
  get now() {
    return this.fleet?.time ?? 0;
  }

  /** Blocks that a flow has moved in the last minute, of one executor or of all. */
  lastMinute(flow, executor) {
    let sum = 0;
    for (const [name, flows] of this.flows) {
      if (!executor || name === executor) sum += flows.get(flow).total(this.now);
    }
    return sum;
  }

  /** Blocks that a flow has moved in each second of the last minute. */
  perSecond(flow, executor) {
    const sums = new Array(59).fill(0);
    for (const [name, flows] of this.flows) {
      if (executor && name !== executor) continue;
      flows.get(flow).values().forEach((value, index) => (sums[index] += value));
    }
    return sums;
  }

  #takeFleet(fleet) {
    const before = this.fleet;
    this.fleet = fleet;
    const elapsed = before ? Math.min(Math.max(fleet.time - before.time, 0), 5) : 0;
    if (before && fleet.scheduler.uptime_seconds < before.scheduler.uptime_seconds - 1) this.restarted = fleet.time;
    this.tokens.push(fleet.scheduler?.tokens_per_second ?? 0);
    this.running.push(fleet.scheduler?.requests_running ?? 0);
    const present = new Set();
    for (const executor of fleet.executors) {
      const name = executor.executor_id;
      present.add(name);
      this.#takeRates(name, executor, elapsed);
      if (!this.executorTokens.has(name)) this.executorTokens.set(name, new Ring(POINTS));
      this.executorTokens.get(name).push(executor.tokens_per_second ?? 0);
    }
    this.#noticeGone(present, fleet.time);
    for (const executor of fleet.executors) {
      const { state, running, preemptions } = executor;
      this.#seen.set(executor.executor_id, { state, running, preemptions });
    }
  }

  #takeMap(data) {
    const name = `${data.executor_id}/${data.tier}`;
    const before = this.maps.get(name);
    // The same picture again is not drawn again.
    const same = (field) => before[field] === data[field];
    const fields = ["encoded", "first", "count", "num_blocks", "blocks_per_cell", "colour"];
    data.encoded = data.cells;
    data.labels = JSON.stringify(data.legend);
    if (before && [...fields, "labels"].every(same)) return;
    this.maps.set(name, decode(data));
  }

  #takeRates(name, executor, elapsed) {
    if (!this.flows.has(name)) this.flows.set(name, new Map(FLOWS.map((flow) => [flow, new LastMinute()])));
    const flows = this.flows.get(name);
    for (const flow of FLOWS) flows.get(flow).add(this.now, (executor.rates?.[flow] ?? 0) * elapsed);
    const before = this.#seen.get(name);
    if (before) this.preemptions.add(this.now, Math.max(0, (executor.preemptions ?? 0) - (before.preemptions ?? 0)));
  }

  #noticeGone(present, time) {
    for (const [name, last] of this.#seen) {
      if (present.has(name)) continue;
      this.gone.set(name, { at: time, running: last.running, state: last.state, moved: new Set(), to: new Set() });
      this.#seen.delete(name);
      for (const key of this.maps.keys()) if (key.startsWith(`${name}/`)) this.maps.delete(key);
    }
    for (const [name, { at }] of this.gone) {
      if (present.has(name) || time - at > GONE_SECONDS) this.gone.delete(name);
    }
    for (const name of this.flows.keys()) {
      if (present.has(name) || this.gone.has(name)) continue;
      this.flows.delete(name);
      this.executorTokens.delete(name);
    }
  }

  #takeRequests(requests) {
    this.requests = requests;
    const placed = new Map();
    for (const each of requests.running) {
      const before = this.#placed.get(each.request_id);
      // While it waits for its next executor, it is still counted as coming from the last one.
      const executor = each.executor_id || before;
      if (executor) placed.set(each.request_id, executor);
      const gone = before && before !== executor ? this.gone.get(before) : undefined;
      if (gone) {
        gone.moved.add(each.request_id);
        gone.to.add(executor);
      }
    }
    for (const each of requests.waiting) {
      const before = this.#placed.get(each.request_id);
      if (before) placed.set(each.request_id, before);
    }
    this.#placed = placed;
  }
}

function decode(map) {
  const text = atob(map.cells);
  const cells = new Uint8Array(text.length);
  for (let index = 0; index < text.length; index += 1) cells[index] = text.charCodeAt(index);
  const legend = map.legend.map(([index, label]) => [index, map.colour === "state" ? label.replaceAll("_", " ") : label]);
  return { ...map, legend, cells };
}
