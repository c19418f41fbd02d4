// Bounded histories: a page that stays open for days holds as much as after a minute.

/** The newest `size` numbers. */
export class Ring {
  #values;
  #next = 0;
  #filled = 0;

  constructor(size) {
    this.#values = new Float64Array(size);
  }

  push(value) {
    this.#values[this.#next] = value;
    this.#next = (this.#next + 1) % this.#values.length;
    this.#filled = Math.min(this.#filled + 1, this.#values.length);
  }

  /** Oldest first. */
  values() {
    const size = this.#values.length;
    const first = (this.#next - this.#filled + size) % size;
    return Array.from({ length: this.#filled }, (_, index) => this.#values[(first + index) % size]);
  }
}

/** Sums of what has happened in each of the last 60 seconds. */
export class LastMinute {
  #sums = new Float64Array(60);
  #second = 0;

  /** Add an amount in the second `now`. */
  add(now, amount) {
    this.#forward(now);
    this.#sums[this.#second % 60] += amount;
  }

  /** What has happened in the minute before the second `now`. */
  total(now) {
    this.#forward(now);
    return this.#sums.reduce((sum, each) => sum + each, 0);
  }

  /** Per second, oldest first, without the second that has not ended. */
  values() {
    return Array.from({ length: 59 }, (_, index) => this.#sums[(this.#second + 1 + index) % 60]);
  }

  #forward(now) {
    const second = Math.floor(now);
    const passed = second - this.#second;
    if (passed <= 0) return;
    if (passed >= 60) this.#sums.fill(0);
    else for (let step = 1; step <= passed; step += 1) this.#sums[(this.#second + step) % 60] = 0;
    this.#second = second;
  }
}
