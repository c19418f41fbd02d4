// Numbers, times and amounts as people read them.

const WHOLE = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });
const TENTHS = new Intl.NumberFormat("en-US", { maximumFractionDigits: 1 });

/** A number; one decimal below ten. Unknown values are a dash. */
export function num(value) {
  if (value === undefined || value === null || Number.isNaN(value)) return "–";
  return Math.abs(value) < 10 && !Number.isInteger(value) ? TENTHS.format(value) : WHOLE.format(value);
}

/** "1 block", "2 blocks". */
export function count(value, noun) {
  return `${num(value)} ${noun}${value === 1 ? "" : "s"}`;
}

/** What a map shows: pages, if it shows the groups of layers that have them. */
export const unitOf = ({ colour }) => (colour === "group" ? "page" : "block");

/** A share from 0 to 1 as a percentage. */
export function percent(value) {
  if (value === undefined || value === null || Number.isNaN(value)) return "–";
  const hundredths = value * 100;
  return `${hundredths > 0 && hundredths < 10 ? TENTHS.format(hundredths) : WHOLE.format(hundredths)}%`;
}

/** A duration of so many seconds. */
export function seconds(value) {
  if (value === undefined || value === null) return "–";
  if (value === 0) return "0 s";
  if (value < 0.001) return `${WHOLE.format(value * 1e6)} µs`;
  if (value < 1) return `${num(value * 1000)} ms`;
  if (value < 120) return `${TENTHS.format(value)} s`;
  if (value < 7200) return `${WHOLE.format(value / 60)} min`;
  return `${TENTHS.format(value / 3600)} h`;
}

/** A duration of so many microseconds. */
export function micros(value) {
  return value === undefined || value === null ? "–" : seconds(value / 1e6);
}

/** An amount of memory. */
export function bytes(value) {
  if (value === undefined || value === null) return "–";
  const units = ["bytes", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${num(value)} ${units[unit]}`;
}

/** The beginning of an id that is too long for a table. */
export function short(id, most = 12) {
  return id && id.length > most ? `${id.slice(0, most - 1)}…` : id || "–";
}
