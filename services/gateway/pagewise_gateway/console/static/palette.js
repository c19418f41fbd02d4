// Colours of blocks. They are those of Okabe and Ito, which people who see few colours tell apart, made a little lighter
// or darker for either theme. States also differ in brightness, and rare ones have a pattern.

const STATES = {
  light: { free: "#e3e8ef", cached: "#5aa9e0", in_use: "#e08a00", lent: "#008f68", copying: "#b0478f" },
  dark: { free: "#232c3b", cached: "#3d8fd1", in_use: "#f5ac33", lent: "#2cc295", copying: "#e08cc2" },
};

const TIERS = {
  light: { device: "#5b5fc7", host: "#8a7a00", device_and_host: "#c64a00" },
  dark: { device: "#9a9df5", host: "#e6d84a", device_and_host: "#ff8a4c" },
};

const AGES = {
  light: ["#fde725", "#9bd93c", "#4ac16d", "#1fa187", "#277f8e", "#365c8d", "#46327e", "#440154"],
  dark: ["#fde725", "#a0da39", "#4ac16d", "#1fa187", "#2a8b99", "#4475b5", "#6f55b5", "#8a4fa3"],
};

const GROUPS = {
  light: ["#0072b2", "#e08a00", "#008f68", "#b0478f", "#c64a00", "#3aa0dd", "#8a7a00", "#5b5fc7", "#7b4b2a", "#5f7d95"],
  dark: ["#4aa3df", "#f5ac33", "#2cc295", "#e08cc2", "#ff8a4c", "#8fd3ff", "#e6d84a", "#9a9df5", "#c69070", "#a9bfd0"],
};

const KINDS = { full: "#3d8fd1", latent: "#7a7de0", window: "#1f9e7c", chunk: "#a88b00", state: "#b8509a" };

const FLASHES = {
  light: { evicted: "#c8102e", taken: "#111827", arrived: "#0b61a4", released: "#0b61a4", copying: "#7a1763", changed: "#111827" },
  dark: { evicted: "#ff6b57", taken: "#ffffff", arrived: "#a8dcff", released: "#a8dcff", copying: "#ffc4ec", changed: "#ffffff" },
};

/** Whether a label of a legend stands for nothing at all. */
export const isNeutral = (label) => label === "free";

/** "light" or "dark". */
export function theme() {
  return document.documentElement.dataset.theme === "dark" ? "dark" : "light";
}

/**
 * Keeps the colour of a request or prefix as long as it is in view, and gives it to another one later.
 */
class Slots {
  #slots = new Map();

  /** A slot for each of the labels; those that are not among them any more are forgotten. */
  assign(labels) {
    const wanted = new Set(labels);
    for (const label of this.#slots.keys()) if (!wanted.has(label)) this.#slots.delete(label);
    const used = new Set(this.#slots.values());
    let next = 0;
    for (const label of labels) {
      if (this.#slots.has(label)) continue;
      while (used.has(next)) next += 1;
      this.#slots.set(label, next);
      used.add(next);
    }
    return this.#slots;
  }
}

const slots = new Slots();

/** How long a block of the colour "age" has not been used; undefined for blocks that have no age. */
export function ageOf(label) {
  if (label === "used last") return 0;
  const known = /^unused for (\d+) or less$/.exec(label);
  return known ? Number(known[1]) : undefined;
}

/** CSS colours of a legend ([[index, label], …]), by index. `mode`: state, request, prefix, age, tier or group. */
export function colours(mode, legend) {
  const now = theme();
  const found = new Map();
  if (mode === "group") {
    for (const [index, label] of legend) found.set(index, ofGroup(label) ?? STATES[now].free);
    return found;
  }
  if (mode === "request" || mode === "prefix") {
    const assigned = slots.assign(legend.map(([, label]) => label).filter((label) => !isNeutral(label)));
    for (const [index, label] of legend) {
      const state = STATES[now][label.replaceAll(" ", "_")];
      found.set(index, state ?? group(now, assigned.get(label)));
    }
    return found;
  }
  const named = { ...STATES[now], ...TIERS[now] };
  const ages = legend.map(([, label]) => ageOf(label)).filter((age) => age !== undefined);
  ages.sort((a, b) => a - b);
  for (const [index, label] of legend) {
    const place = ages.indexOf(ageOf(label));
    if (place >= 0) found.set(index, AGES[now][Math.round((place * 7) / Math.max(ages.length - 1, 1))]);
    else found.set(index, named[label.replaceAll(" ", "_")] ?? group(now, index));
  }
  return found;
}

/** Cached pages of a group of layers are paler than those in use. */
function ofGroup(label) {
  const colour = KINDS[label.split(" ")[0]];
  return colour && (label.endsWith(" cached") ? `${colour}80` : colour);
}

function group(now, slot) {
  const all = GROUPS[now];
  return all[slot % all.length];
}

/** The colour in which a change flashes. */
export function flashColour(kind) {
  return FLASHES[theme()][kind];
}
