// Requests to the gateway. The API key lives in sessionStorage: it is forgotten when the tab is closed.

const KEY = "pagewise-api-key";
let memory = "";

/** The operator's key, "" if none was given. */
export function apiKey() {
  try {
    return sessionStorage.getItem(KEY) || memory;
  } catch {
    return memory; // storage is forbidden: the key lasts as long as the page
  }
}

/** Remember a key; "" forgets it. */
export function setApiKey(key) {
  memory = key;
  try {
    if (key) sessionStorage.setItem(KEY, key);
    else sessionStorage.removeItem(KEY);
  } catch {
    // as above
  }
}

/** An answer that is no success; `status` is HTTP's. */
export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** fetch() with the key; raises ApiError with the server's own message. */
export async function request(path, options = {}) {
  const key = apiKey();
  const headers = { ...options.headers, ...(key ? { Authorization: `Bearer ${key}` } : {}) };
  const answer = await fetch(path, { cache: "no-store", ...options, headers });
  if (!answer.ok) {
    const text = await answer.text().catch(() => "");
    throw new ApiError(answer.status, messageOf(text) || `the server answered ${answer.status}`);
  }
  return answer;
}

function messageOf(text) {
  try {
    return JSON.parse(text).error.message;
  } catch {
    return text.slice(0, 200);
  }
}

/** A JSON answer to a GET. */
export async function getJson(path, options = {}) {
  return (await request(path, options)).json();
}

/** A POST of JSON, which is declared even if there is none: without keys, a server takes no POST without a type. */
export function post(path, body, options = {}) {
  return request(path, {
    method: "POST",
    body: body === undefined ? undefined : JSON.stringify(body),
    headers: { "Content-Type": "application/json" },
    ...options,
  });
}
