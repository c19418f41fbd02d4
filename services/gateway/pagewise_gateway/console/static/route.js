// What is shown stands in the address: `#/memory?executor=executor-0&colour=age`, so that it can be kept and sent on.

export const VIEWS = [
  ["memory", "Memory map"],
  ["prefixes", "Prefix tree"],
  ["requests", "Requests"],
  ["fleet", "Fleet"],
  ["try", "Try it"],
];

const NAMES = new Set(VIEWS.map(([name]) => name));

/** The view, and its parameters as strings. */
export function readRoute() {
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split("?");
  return { view: NAMES.has(path) ? path : "memory", params: Object.fromEntries(new URLSearchParams(query)) };
}

/** The address of a view; parameters that are empty are left out. */
export function href(view, params = {}) {
  const kept = Object.entries(params).filter(([, value]) => value !== undefined && value !== null && value !== "");
  const query = new URLSearchParams(kept.map(([name, value]) => [name, String(value)])).toString();
  return `#/${view}${query ? `?${query}` : ""}`;
}

/** Show a view. `replace`: without a step in the browser's history, for zooming. */
export function go(view, params, replace = false) {
  if (replace) {
    history.replaceState(null, "", href(view, params));
    dispatchEvent(new HashChangeEvent("hashchange"));
  } else {
    location.hash = href(view, params);
  }
}
