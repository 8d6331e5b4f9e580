// The session: the token, which is kept as long as the tab is open, and what it allows.

const KEY = "outerstep.token";

/** Take a token from the address (`/#token=…`) and remove it there, so that it does not enter the history. */
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

/** The holder of a token; `own` is the response of `GET /v1/tokens/self`. */
export class Session {
  constructor(api, own) {
    this.api = api;
    this.own = own;
  }

  /** True if the token has this scope for `run`; null: for all runs. */
  allows(scope, run = null) {
    return this.own.allows.includes(scope) && (this.own.run === null || this.own.run === run);
  }

  /** The token's scope in words. */
  get description() {
    const what = this.own.scope === null ? `member ${this.own.worker}` : this.own.scope;
    return this.own.run === null ? what : `${what} of ${this.own.run}`;
  }
}
