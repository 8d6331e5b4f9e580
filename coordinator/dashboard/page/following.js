// A run as it goes: what was asked of the coordinator, kept, and asked again as gently as it stays true.
//
// The stream of events says that something has happened; then the run and its open round are asked for, and of the
// listings what is new. What heartbeats bring makes no event, so workers are asked for every few seconds, the more
// seldom the more there are. While nobody looks, as the tab is hidden, nothing is asked at all.
//
// Others look too. So answers that were made for them will do: of a second after an event, of a few otherwise; and what
// these do not show for sure, as they may be older than the event, is asked for once more.

import { Unreachable, pause, runPath } from "./api.js";
import { natural } from "./units.js";

export const SHOWN_ROUNDS = 24; // in the timeline: each is a request of its own
const SHOWN_EVENTS = 100;
const NEW_ROUNDS = 3; // in a look: the open one, and those before it that workers still report on
const NOT_SOONER_S = 1.5;
const IDLE_S = 5;
const WOKEN_AGE_S = 1; // of answers after an event
const IDLE_AGE_S = 4; // less than the time between two looks, so that no answer is older than the one before
const EPOCHS_EVERY_S = 15;

export class Following {
  /** `changed` is called when there is something new, `ended` with an error after which nothing is asked any more. */
  constructor(api, name, changed, ended) {
    Object.assign(this, { api, name, changed, ended });
    this.run = null;
    this.current = null; // the open round with its fragments, and when it was asked for
    this.asked_at = 0;
    this.rounds = new Map(); // by number
    this.details = new Map(); // the last ones, with their fragments and accounts
    this.hasRounds = this.hasDetails = false; // whether they have been asked for: before that, none is unknown
    this.workers = null;
    this.workers_at = this.epochs_at = -Infinity; // when they were asked for last
    this.epochs = null; // and of the newest of them the ranges of its units
    this.ranges = [];
    this.events = null; // the last ones, oldest first
    this.trouble = null;
    this.heard_at = 0; // when an event came, or this page has changed something, last
    this.shown_until = -Infinity; // what has happened until then is shown
    this.now = false; // the next look is for what is true at that moment
    this.wake = () => {};
    this.look = () => (document.hidden ? this.rest() : this.resume());
  }

  start() {
    document.addEventListener("visibilitychange", this.look);
    this.look();
  }

  stop() {
    document.removeEventListener("visibilitychange", this.look);
    this.rest();
  }

  rest() {
    this.asking?.abort();
    this.asking = null;
  }

  resume() {
    if (this.asking) return;
    this.asking = new AbortController();
    this.heard_at = performance.now(); // perhaps, meanwhile
    const { signal } = this.asking;
    for (const part of [this.#ask(signal), this.#listen(signal)]) {
      part.catch((error) => {
        if (signal.aborted) return;
        this.stop();
        this.ended(error);
      });
    }
  }

  /** Ask again at once: this page itself has changed something. */
  refresh() {
    this.heard_at = performance.now();
    this.now = true;
    this.workers_at = -Infinity;
    this.wake(true);
  }

  /** The rounds that are published, oldest first. */
  get published() {
    return [...this.rounds.values()].filter((each) => each.state === "published").sort((a, b) => a.round - b.round);
  }

  /** The details of the last published rounds, oldest first. */
  get lastDetails() {
    return [...this.details.values()].sort((a, b) => a.round - b.round);
  }

  async #ask(signal) {
    let growing_s = 1;
    while (!signal.aborted) {
      try {
        const began = performance.now();
        const age_s = this.now ? 0 : this.#isAllShown() ? IDLE_AGE_S : WOKEN_AGE_S;
        this.now = false;
        await this.#refresh(signal, age_s);
        this.shown_until = Math.max(this.shown_until, began - 1000 * age_s);
        this.trouble = null;
        growing_s = 1;
        await this.#rest(NOT_SOONER_S, false);
        if (this.#isAllShown()) await this.#rest(IDLE_S - NOT_SOONER_S, true);
      } catch (error) {
        if (signal.aborted || !(error instanceof Unreachable || error.status >= 429)) throw error;
        this.trouble = error.message;
        this.changed();
        await this.#rest(growing_s, false);
        growing_s = Math.min(30, 2 * growing_s);
      }
    }
  }

  #isAllShown() {
    return this.heard_at <= this.shown_until;
  }

  #rest(seconds, canBeWoken) {
    return new Promise((done) => {
      const timer = setTimeout(done, 1000 * seconds);
      this.wake = (atOnce = false) => {
        if (!canBeWoken && !atOnce) return;
        clearTimeout(timer);
        done();
      };
    });
  }

  /** Ask for what is at most `age_s` old. */
  async #refresh(signal, age_s) {
    const path = (...rest) => runPath(this.name, ...rest);
    const [run, { items }] = await Promise.all([
      this.api.get(path(), signal, age_s),
      this.api.get(`${path("rounds")}?limit=${NEW_ROUNDS}`, signal, age_s),
    ]);
    const open = items.length > 0 && items[0].state !== "published";
    this.current = open ? await this.api.get(path("rounds", items[0].round), signal, age_s) : null;
    this.run = run;
    this.asked_at = performance.now();
    this.changed();
    await this.#workers(path("workers"), signal, age_s);
    await this.#rounds(path("rounds"), items, signal, age_s);
    if (performance.now() - this.epochs_at >= 1000 * EPOCHS_EVERY_S) {
      this.epochs_at = performance.now();
      this.epochs = (await this.api.get(`${path("units")}?limit=100`, signal, age_s)).items;
      this.ranges = this.epochs.length ? await this.#ranges(path("units", "ranges"), this.epochs[0], signal, age_s) : [];
      this.changed();
    }
  }

  /** Return the ranges of an epoch's units that were assigned, in their order. */
  async #ranges(path, epoch, signal, age_s) {
    const ranges = [];
    const stop = epoch.units === null ? Infinity : epoch.first + epoch.units;
    for await (const page of this.api.pages(path, 1000, signal, age_s, epoch.first)) {
      ranges.push(...page.filter((each) => each.start < stop));
      if (!page.length || page.at(-1).stop >= stop) break;
    }
    return ranges;
  }

  async #workers(path, signal, age_s) {
    const every_s = IDLE_S * (1 + (this.workers?.length ?? 0) / 100);
    if (performance.now() - this.workers_at < 1000 * every_s - 100) return;
    const workers = await this.api.all(path, signal, age_s && Math.ceil(every_s / 5));
    this.workers = workers.sort((a, b) => natural(a.name, b.name));
    this.workers_at = performance.now();
    this.changed();
  }

  /** Keep the `newest` rounds, and ask for what is missing between them and those that are known. */
  async #rounds(path, newest, signal, age_s) {
    const known = Math.max(-1, ...this.rounds.keys());
    const now = newest.length ? newest[0].round : -1;
    for (const number of this.rounds.keys()) if (number > now) this.#forget(number); // the run went back
    if (newest.length === NEW_ROUNDS && newest.at(-1).round > known + 1) {
      for await (const page of this.api.pages(path, 1000, signal, age_s)) {
        this.#keep(page);
        if (page.at(-1).round <= known + 1) break;
      }
    }
    this.#keep(newest);
    this.hasRounds = true;
    this.changed();
    await this.#details(path, signal, age_s);
  }

  #keep(items) {
    for (const item of items) this.rounds.set(item.round, item);
  }

  #forget(number) {
    this.rounds.delete(number);
    this.details.delete(number);
  }

  /** Ask for the last rounds one by one, where they are not known to the end: workers report on each a round later. */
  async #details(path, signal, age_s) {
    const shown = this.published.slice(-SHOWN_ROUNDS).map((each) => each.round);
    for (const number of this.details.keys()) if (!shown.includes(number)) this.details.delete(number);
    const state = (round) => round && `${round.closed_at} ${JSON.stringify(round.account)}`;
    const isKnown = (number) => state(this.details.get(number)) === state(this.rounds.get(number));
    const wanted = shown.filter((number) => !isKnown(number)).reverse();
    for (let i = 0; i < wanted.length; i += 6) {
      const some = wanted.slice(i, i + 6);
      const found = await Promise.all(some.map((number) => this.api.get(`${path}/${number}`, signal, age_s)));
      found.forEach((each) => this.details.set(each.round, each));
      this.changed();
    }
    this.hasDetails = true;
    this.changed();
  }

  /** Follow the stream of events; where there may be no more of them, for many share a token, ask now and then. */
  async #listen(signal) {
    const path = runPath(this.name, "events");
    while (!signal.aborted) {
      try {
        this.events ??= await lastEvents(this.api, path, SHOWN_EVENTS, signal);
        this.changed();
        for await (const event of this.api.stream(path, this.#lastEvent(), signal)) this.#heard([event]);
        await pause(1);
      } catch (error) {
        if (signal.aborted || error.status === 401 || error.status === 404) throw error;
        await pause(IDLE_S);
        if (error.status === 429 && !signal.aborted) {
          const after = this.#lastEvent();
          this.#heard((await this.api.get(`${path}?limit=100&after=${after}`, signal)).items);
        }
      }
    }
  }

  #lastEvent() {
    return this.events?.at(-1)?.id ?? 0;
  }

  #heard(events) {
    if (!events.length) return;
    this.events = [...this.events, ...events].slice(-SHOWN_EVENTS);
    this.heard_at = performance.now();
    this.wake();
    this.changed();
  }
}

/**
 * Return the last events: `most` at most, and a quarter of that at least where there are as many. The listing begins with
 * the oldest and may be long, so its end is searched for: each question halves where it may be.
 */
export async function lastEvents(api, path, most, signal) {
  const after = (number) => api.get(`${path}?limit=${most}&after=${number}`, signal);
  let page = await after(0);
  if (page.next === null) return page.items;
  let last = page.items;
  let low = last.at(-1).id; // above it there are events,
  let high = null; // and above this one too few, or none
  for (let step = 1024; high === null || low + 1 < high; step *= 2) {
    const middle = high === null ? low + step : Math.floor((low + high) / 2);
    page = await after(middle);
    if (page.items.length) last = page.items;
    if (page.next !== null) low = page.items.at(-1).id;
    else if (page.items.length >= most / 4) return page.items;
    else high = middle;
  }
  return last;
}
