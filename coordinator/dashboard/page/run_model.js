// The model of a run: what the views show, kept up to date with few requests.
//
// After each event in the stream, the run, its open round, and new items of the listings are requested. Heartbeats make
// no events, so workers are requested every few seconds, less often the more there are. A hidden tab requests nothing.
//
// Many people may watch a run. So the model accepts responses that were made for others (max-age): up to a second old
// after an event, otherwise a few seconds. A response that may be older than the event is requested once more.

import { Unreachable, pause, runPath } from "./api.js";
import { natural } from "./units.js";

export const SHOWN_ROUNDS = 24; // in the timeline; each needs a separate request
const SHOWN_EVENTS = 100;
const NEW_ROUNDS = 3; // per refresh: the open one, and earlier ones that workers still report on
const MIN_PAUSE_S = 1.5;
const IDLE_S = 5;
const WOKEN_AGE_S = 1; // oldest accepted response after an event
const IDLE_AGE_S = 4; // otherwise; shorter than the refresh interval, so that no response is older than the last one
const EPOCHS_EVERY_S = 15;

export class RunModel {
  /** `changed` is called when there is something new, `ended` with the error that ended all requests. */
  constructor(api, name, changed, ended) {
    Object.assign(this, { api, name, changed, ended });
    this.run = null;
    this.current = null; // the open round with its fragments; `asked_at`: when it was requested
    this.asked_at = 0;
    this.rounds = new Map(); // by number
    this.details = new Map(); // the last ones, with their fragments and accounts
    this.hasRounds = this.hasDetails = false; // true once they were requested: then an empty list means none
    this.workers = null;
    this.workers_at = this.epochs_at = -Infinity; // when they were last requested
    this.epochs = null; // newest first; `ranges`: the units of the newest one
    this.ranges = [];
    this.events = null; // the last ones, oldest first
    this.trouble = null;
    this.heard_at = 0; // time of the last event, or of the last change by this page
    this.shown_until = -Infinity; // everything up to then is shown
    this.now = false; // the next refresh accepts only fresh responses
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
    this.heard_at = performance.now(); // there may have been events meanwhile
    const { signal } = this.asking;
    for (const part of [this.#ask(signal), this.#listen(signal)]) {
      part.catch((error) => {
        if (signal.aborted) return;
        this.stop();
        this.ended(error);
      });
    }
  }

  /** Refresh at once, after this page has changed something. */
  refresh() {
    this.heard_at = performance.now();
    this.now = true;
    this.workers_at = -Infinity;
    this.wake(true);
  }

  /** The published rounds, oldest first. */
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
        await this.#rest(MIN_PAUSE_S, false);
        if (this.#isAllShown()) await this.#rest(IDLE_S - MIN_PAUSE_S, true);
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

  /** Request everything that changed, at most `age_s` old. */
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

  /** Return the ranges of an epoch's units, in their order. */
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

  /** Keep the `newest` rounds, and request those between them and the known ones. */
  async #rounds(path, newest, signal, age_s) {
    const known = Math.max(-1, ...this.rounds.keys());
    const now = newest.length ? newest[0].round : -1;
    for (const number of this.rounds.keys()) if (number > now) this.#forget(number); // the run was rolled back
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

  /** Request the details of the last rounds that are not complete: workers report on a round during the next one. */
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

  /** Follow the stream of events. If the token has no stream left (429), poll the events instead. */
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
 * Return the last events: at most `most`, and at least a quarter of that if there are as many. The listing is long and
 * starts with the oldest, so its end is found by binary search.
 */
export async function lastEvents(api, path, most, signal) {
  const after = (number) => api.get(`${path}?limit=${most}&after=${number}`, signal);
  let page = await after(0);
  if (page.next === null) return page.items;
  let last = page.items;
  let low = last.at(-1).id; // there are events after this one,
  let high = null; // and too few or none after this one
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
