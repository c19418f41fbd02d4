// What happens, in sentences. They are made from what the page has seen, so they need nothing but the stream.

import { bytes, count, num, percent } from "./format.js";

const PRESSED = 0.97; // of a pool without a free block, with blocks leaving it

/** Captions, the most important first: {tone: "bad" | "warn" | "busy" | "calm", title, text}. */
export function captions(store) {
  const { fleet } = store;
  if (store.problems.fleet) {
    return [{ tone: "bad", title: "The scheduler does not answer", text: `${store.problems.fleet}. Streams pause, and go on when it is back.` }];
  }
  if (!fleet) return [{ tone: "calm", title: "Waiting for the first update", text: "The stream is being opened." }];
  const found = [...goneExecutors(store), ...scheduler(store), ...noExecutor(fleet), ...goneGateways(fleet)];
  found.push(...pressure(store), ...work(store), ...recovered(store));
  return found;
}

function goneExecutors(store) {
  return [...store.gone].map(([name, { running, moved, to, state }]) => {
    const left = state === "draining" ? "has left" : "is gone";
    const where = to.size ? ` to ${[...to].join(" and ")}` : "";
    const title = moved.size
      ? `${name} ${left}: ${count(moved.size, "request")} moved${where}`
      : `${name} ${left}${running ? `: ${count(running, "request")} of it will move` : ""}`;
    const text = "Their streams pause and go on with the same tokens. Blocks that only this executor held are computed again.";
    return { tone: state === "draining" ? "warn" : "bad", title, text: moved.size || running ? text : "Nothing ran there." };
  });
}

function scheduler({ restarted, now }) {
  if (!restarted || now - restarted > 60) return [];
  const text = "Gateways have submitted their requests again, and executors have offered the blocks that they hold.";
  return [{ tone: "warn", title: "The scheduler was started again", text }];
}

function noExecutor({ executors }) {
  if (executors.some(({ state }) => state === "ready")) return [];
  return [{ tone: "bad", title: "No executor is ready", text: "Requests wait until one is, for a bounded time." }];
}

function goneGateways({ gateways }) {
  const lost = gateways.filter(({ state }) => state === "lost");
  const silent = gateways.filter(({ state }) => state === "silent");
  return [
    ...lost.map(({ gateway_id: name, requests, reason }) => ({
      tone: "bad",
      title: `The gateway ${name} is lost`,
      text: `${count(requests, "request")} of its clients ended: ${reason}.`,
    })),
    ...silent.map(({ gateway_id: name }) => ({ tone: "warn", title: `The gateway ${name} is silent`, text: "Some of its heartbeats have not come." })),
  ];
}

function pressure(store) {
  const demoted = store.lastMinute("demoted");
  const dropped = store.lastMinute("dropped");
  const evicted = Math.max(store.lastMinute("evicted"), demoted + dropped);
  const preemptions = store.lastMinute("preemptions");
  const preempted = preemptions >= 1 ? ` ${count(Math.round(preemptions), "sequence")} had to give way (preempted).` : "";
  const { total, free } = pools(store.fleet);
  const full = total ? 1 - free / total : 0;
  if (demoted >= 1) {
    const more = dropped >= 1 ? `, ${num(dropped)} dropped` : "";
    const text = `The device pools are ${percent(full)} full. Evicted blocks go to host memory, from where they can be loaded.${preempted}`;
    return [{ tone: "warn", title: `Memory pressure: ${count(Math.round(demoted), "block")} demoted to host in the last minute${more}`, text }];
  }
  if (evicted >= 1 && full > PRESSED / 2) {
    const text = `The device pools are ${percent(full)} full, and there is no tier below that evicted blocks could go to.${preempted}`;
    return [{ tone: "warn", title: `Memory pressure: ${count(Math.round(evicted), "cached block")} evicted in the last minute`, text }];
  }
  return preempted ? [{ tone: "warn", title: `Memory pressure:${preempted.slice(0, -1)}`, text: "In the last minute." }] : [];
}

function recovered(store) {
  const ways = [
    ["loaded", "loaded from host memory"],
    ["fetched", "fetched from other executors"],
    ["recalled", "read back from storage"],
  ];
  const parts = ways
    .map(([flow, words]) => [store.lastMinute(flow), words])
    .filter(([blocks]) => blocks >= 1)
    .map(([blocks, words]) => `${num(Math.round(blocks))} ${words}`);
  if (!parts.length) return [];
  return [{ tone: "busy", title: `Recovered in the last minute: ${parts.join(", ")}`, text: "Blocks that were not computed again." }];
}

function work({ fleet }) {
  const { requests_running: running, requests_waiting: waiting } = fleet.scheduler;
  const { saved, cached, inUse, savedBytes, unit } = pools(fleet);
  if (!running && !waiting) {
    const text = cached
      ? `${count(cached, unit)} stay cached, for prompts that begin like earlier ones.`
      : "Blocks of the pools are free. They fill as requests come.";
    return [{ tone: "calm", title: "Idle: no request runs", text }];
  }
  const executors = fleet.executors.filter(({ state }) => state === "ready" || state === "draining").length;
  const queue = waiting ? `, ${num(waiting)} wait` : "";
  const title = `${count(running, "request")} run${running === 1 ? "s" : ""} on ${count(executors, "executor")}${queue}`;
  const memory = savedBytes ? ` (${bytes(savedBytes)})` : "";
  const text = saved
    ? `They hold ${num(inUse)} ${unit}s. Without sharing they would hold ${num(inUse + saved)}: it saves ${num(saved)} ${unit}s${memory}.`
    : `They hold ${num(inUse)} ${unit}s, each of them by one request.`;
  return [{ tone: "busy", title, text }];
}

/** What the device pools hold together: blocks, or pages where groups of layers share the memory. */
export function pools(fleet) {
  const sum = { total: 0, free: 0, cached: 0, inUse: 0, saved: 0, savedBytes: 0, unit: "block" };
  for (const executor of fleet?.executors ?? []) {
    const { counts = {} } = executor;
    const [full] = executor.device.groups ?? [];
    if (full) sum.unit = "page";
    sum.total += executor.device.num_blocks;
    sum.free += counts.free ?? 0;
    sum.cached += counts.cached ?? 0;
    sum.inUse += (counts.in_use ?? 0) + (counts.lent ?? 0) + (counts.copying ?? 0);
    sum.saved += (executor.saved_blocks ?? 0) * (full?.pages_per_block ?? 1);
    sum.savedBytes += (executor.saved_blocks ?? 0) * (executor.bytes_per_block ?? 0);
  }
  return sum;
}
