// The stream of the console: one at a time, opened anew when the view changes or when it breaks.

import { ApiError, request } from "./api.js";
import { readEvents } from "./sse.js";

const FIRST_WAIT = 500;
const LONGEST_WAIT = 8000;
const SILENCE = 15000; // the gateway sends several events a second, so silence means that it is gone
const HIDDEN = 30000; // a page that nobody looks at costs the server nothing after that long

/**
 * Keeps `/console/stream` open. `onEvent(name, object)` gets every event; `onState(state, message)` one of
 * "connecting", "live", "disconnected" (it tries again by itself), "key" (a key is needed) and "paused".
 */
export class Stream {
  #query = "";
  #abort = new AbortController();
  #retry = 0;
  #wait = FIRST_WAIT;
  #watch = 0;
  #hidden = 0;
  #paused = false;

  constructor(onEvent, onState) {
    this.onEvent = onEvent;
    this.onState = onState;
    document.addEventListener("visibilitychange", () => this.#visibility());
  }

  /** Show something else. The same query again changes nothing. */
  open(query) {
    if (query === this.#query) return;
    this.#query = query;
    this.restart();
  }

  /** Begin anew at once: after a key was given, for instance. */
  restart() {
    this.#end();
    this.#wait = FIRST_WAIT;
    this.#run();
  }

  #end() {
    clearTimeout(this.#retry);
    clearTimeout(this.#watch);
    this.#abort.abort();
    this.#abort = new AbortController();
  }

  async #run() {
    const { signal } = this.#abort;
    try {
      const answer = await request(`/console/stream?${this.#query}`, { signal });
      const alive = () => this.#alive();
      alive();
      await readEvents(answer.body, (name, data) => this.#deliver(signal, name, data), alive);
      if (!signal.aborted) this.#broken("the server has ended the stream");
    } catch (error) {
      if (signal.aborted) return;
      if (error instanceof ApiError && (error.status === 401 || error.status === 403)) {
        this.#end();
        this.onState("key", error.message);
      } else {
        this.#broken(error instanceof ApiError ? error.message : "the gateway cannot be reached");
      }
    }
  }

  #deliver(signal, name, data) {
    if (signal.aborted) return;
    this.#wait = FIRST_WAIT;
    this.onState("live", "");
    this.onEvent(name, JSON.parse(data));
  }

  #alive() {
    clearTimeout(this.#watch);
    this.#watch = setTimeout(() => this.#broken("nothing came for 15 seconds"), SILENCE);
  }

  #broken(why) {
    this.#end();
    this.onState("disconnected", why);
    this.#retry = setTimeout(() => this.#run(), this.#wait);
    this.#wait = Math.min(2 * this.#wait, LONGEST_WAIT);
  }

  #visibility() {
    clearTimeout(this.#hidden);
    if (!this.#query) return;
    if (document.hidden) {
      this.#hidden = setTimeout(() => {
        this.#end();
        this.#paused = true;
        this.onState("paused", "");
      }, HIDDEN);
    } else if (this.#paused) {
      this.#paused = false;
      this.onState("connecting", "");
      this.restart();
    }
  }
}
