// Client of the REST interface (docs/rest.md): requests, listings, and the stream of events.

const ATTEMPTS = 4; // per request, if it is rejected temporarily
const MAX_RETRY_AFTER_S = 30;
const TIMEOUT_S = 15; // a broken connection may otherwise stay open for many minutes

/** The coordinator rejected a request; the message is the problem's detail, with a remedy. */
export class Refused extends Error {
  constructor(status, document) {
    super(document.detail || document.title || `the coordinator answered ${status}`);
    this.status = status;
    this.title = document.title || "";
  }
}

/** The coordinator did not answer. */
export class Unreachable extends Error {}

/** Wait for this many seconds. */
export const pause = (seconds) => new Promise((done) => setTimeout(done, 1000 * seconds));

export class Api {
  constructor(token) {
    this.token = token;
  }

  /** Return the response to a request as an object, or null if it has no body. Throws Refused, Unreachable. */
  async ask(method, path, { json, text, headers = {}, signal } = {}) {
    headers = { ...headers };
    if (json !== undefined) headers["Content-Type"] = "application/json";
    if (text !== undefined) headers["Content-Type"] = "application/toml";
    const body = json === undefined ? text : JSON.stringify(json);
    for (let attempt = 1; ; attempt += 1) {
      const answer = await this.send(method, path, headers, body, signal);
      if (answer.ok) return answer.status === 204 ? null : answered(() => answer.json(), signal);
      const refused = new Refused(answer.status, await answer.json().catch(() => ({})));
      const retry_after_s = Number(answer.headers.get("Retry-After") || NaN);
      if (![429, 503].includes(answer.status) || !(retry_after_s <= MAX_RETRY_AFTER_S) || attempt === ATTEMPTS) throw refused;
      await pause(retry_after_s);
    }
  }

  /** GET a response that is at most `age_s` whole seconds old; 0: a fresh one. */
  get(path, signal, age_s = 0) {
    const headers = age_s ? { "Cache-Control": `max-age=${age_s}` } : {};
    return this.ask("GET", path, { headers, signal });
  }

  /** Yield the pages of a listing, of at most `limit` items each, starting after `first` (null: from the start). */
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
    const timer = setTimeout(() => late.abort(), 1000 * TIMEOUT_S);
    const request = {
      method,
      headers: { ...headers, Authorization: `Bearer ${this.token}` },
      body,
      signal: AbortSignal.any([signal ?? late.signal, late.signal]),
      cache: "no-store",
      credentials: "omit",
    };
    try {
      return await answered(() => fetch(new URL(`v1/${path}`, document.baseURI), request), signal);
    } finally {
      clearTimeout(timer);
    }
  }
}

/** Return the result of `receive`. Throws Unreachable if the connection fails, which may be in the middle of a body. */
async function answered(receive, signal) {
  try {
    return await receive();
  } catch (error) {
    if (signal?.aborted || error instanceof SyntaxError) throw error;
    throw new Unreachable(
      "The coordinator does not answer; retrying. Is it running, and is this machine online?",
    );
  }
}

/** The coordinator's address, from which the page was loaded. */
export const coordinator = new URL(".", document.baseURI).href.replace(/\/$/, "");

/** Return the command that joins a run. */
export const joinCommand = (run) => `outerstep worker ${coordinator} --run ${run}`;

/** Return the path of a run, or of something that belongs to it. */
export const runPath = (run, ...rest) => ["runs", run, ...rest].map(encodeURIComponent).join("/");
