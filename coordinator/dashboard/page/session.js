// Who looks at this page: the token, which lives as long as the tab, and what it allows.

const KEY = "outerstep.token";

/** Take a token from the address (`/#token=…`) and remove it there, before it is in anybody's history. */
export function takeTokenFromAddress() {
  const parameters = new URLSearchParams(location.hash.slice(1));
  const token = parameters.get("token");
  if (token === null) return;
  sessionStorage.setItem(KEY, token.trim());
  parameters.delete("token");
  const rest = parameters.toString();
  history.replaceState(null, "", location.pathname + location.search + (rest ? `#${rest}` : ""));
}

export const keptToken = () => sessionStorage.getItem(KEY);
export const keepToken = (token) => sessionStorage.setItem(KEY, token);
export const forgetToken = () => sessionStorage.removeItem(KEY);

/** The holder of a token; `own` is the answer of `GET /v1/tokens/self`. */
export class Session {
  constructor(api, own) {
    this.api = api;
    this.own = own;
  }

  /** Whether the token has this scope, of `run`; null: of all runs. */
  allows(scope, run = null) {
    return this.own.allows.includes(scope) && (this.own.run === null || this.own.run === run);
  }

  /** Who this is, in words. */
  get said() {
    const what = this.own.scope === null ? `member ${this.own.worker}` : this.own.scope;
    return this.own.run === null ? what : `${what} of ${this.own.run}`;
  }
}
