// The REST interface (docs/rest.md): one function for a request, one for a listing, one for the stream of events.

const ATTEMPTS = 4; // at something that is refused for a moment
const GIVEN_UP_S = 30;
const ANSWERS_WITHIN_S = 15; // or it does not: a connection that was cut somewhere may stay open for many minutes

/** The coordinator refused; the message is its own sentence, which says what to do. */
export class Refused extends Error {
  constructor(status, document) {
    super(document.detail || document.title || `the coordinator answered ${status}`);
    this.status = status;
    this.title = document.title || "";
  }
}

/** Nobody answered. */
export class Unreachable extends Error {}

/** Wait. */
export const pause = (seconds) => new Promise((done) => setTimeout(done, 1000 * seconds));

export class Api {
  constructor(token) {
    this.token = token;
  }

  /** Return the answer to a request as an object, or null where it has no body. Throws Refused, Unreachable. */
  async ask(method, path, { json, text, headers = {}, signal } = {}) {
    headers = { ...headers };
    if (json !== undefined) headers["Content-Type"] = "application/json";
    if (text !== undefined) headers["Content-Type"] = "application/toml";
    const body = json === undefined ? text : JSON.stringify(json);
    for (let attempt = 1; ; attempt += 1) {
      const answer = await this.send(method, path, headers, body, signal);
      if (answer.ok) return answer.status === 204 ? null : answer.json();
      const refused = new Refused(answer.status, await answer.json().catch(() => ({})));
      const again_s = Number(answer.headers.get("Retry-After") || NaN);
      if (![429, 503].includes(answer.status) || !(again_s <= GIVEN_UP_S) || attempt === ATTEMPTS) throw refused;
      await pause(again_s);
    }
  }

  /** Ask for what is at most `age_s` old, whole seconds; 0: for what is true now. */
  get(path, signal, age_s = 0) {
    const headers = age_s ? { "Cache-Control": `max-age=${age_s}` } : {};
    return this.ask("GET", path, { headers, signal });
  }

  /** Yield the pages of a listing, each of `limit` items at most, from after `first` on (null: all). */
  async *pages(path, limit, signal, age_s = 0, first = null) {
    const more = path.includes("?") ? "&" : "?";
    for (let after = first === null ? "" : `&after=${first}`; ;) {
      const page = await this.get(`${path}${more}limit=${limit}${after}`, signal, age_s);
      yield page.items;
      if (page.next === null) return;
      after = `&after=${encodeURIComponent(page.next)}`;
    }
  }

  /** Return all items of a listing. */
  async all(path, signal, age_s = 0) {
    const items = [];
    for await (const page of this.pages(path, 1000, signal, age_s)) items.push(...page);
    return items;
  }

  /** Yield the events of a run after number `after`, as they happen. (EventSource could not send the token.) */
  async *stream(path, after, signal) {
    const headers = { Accept: "text/event-stream", "Last-Event-ID": String(after) };
    const answer = await this.send("GET", path, headers, undefined, signal);
    if (!answer.ok) throw new Refused(answer.status, await answer.json().catch(() => ({})));
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (rest + value).split(/\r\n|\n/);
      rest = lines.pop();
      for (const line of lines) if (line.startsWith("data: ")) yield JSON.parse(line.slice(6));
    }
  }

  async send(method, path, headers, body, signal) {
    const late = new AbortController();
    const timer = setTimeout(() => late.abort(), 1000 * ANSWERS_WITHIN_S);
    try {
      return await fetch(new URL(`v1/${path}`, document.baseURI), {
        method,
        headers: { ...headers, Authorization: `Bearer ${this.token}` },
        body,
        signal: AbortSignal.any([signal ?? late.signal, late.signal]),
        cache: "no-store",
        credentials: "omit",
      });
    } catch (error) {
      if (signal?.aborted) throw error;
      throw new Unreachable(
        "The coordinator does not answer; asking again. Is it running, and is this machine online?",
      );
    } finally {
      clearTimeout(timer);
    }
  }
}

/** The coordinator's address, as the page was opened from it. */
export const coordinator = new URL(".", document.baseURI).href.replace(/\/$/, "");

/** Return the command that joins a run. */
export const joinCommand = (run) => `outerstep worker ${coordinator} --run ${run}`;

/** Return the address of a run, or of what belongs to it. */
export const runPath = (run, ...rest) => ["runs", run, ...rest].map(encodeURIComponent).join("/");
