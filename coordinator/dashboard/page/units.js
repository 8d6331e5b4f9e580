// Formats quantities like the commands of `outerstep`: decimal prefixes, few digits, with a unit; a dash if unknown.

export const UNKNOWN = "–";
export const ASKING = "Loading …"; // until the coordinator has answered
const PREFIXES = ["", "k", "M", "G", "T", "P"];
const SPACE = "\u00a0"; // no line break between a number and its unit

const isKnown = (value) => value !== null && value !== undefined && Number.isFinite(value);

/** 1234567 -> "1.23 M" */
export function count(value) {
  if (!isKnown(value)) return UNKNOWN;
  let prefix = 0;
  for (; Math.abs(value) >= 999.5 && prefix < PREFIXES.length - 1; prefix += 1) value /= 1000;
  if (prefix === 0) return Number.isInteger(value) || Math.abs(value) >= 100 ? value.toFixed(0) : value.toPrecision(3);
  return `${Number(value.toPrecision(3))}${SPACE}${PREFIXES[prefix]}`;
}

/** 1234567 -> "1.23 MB" */
export function bytes(value) {
  if (!isKnown(value)) return UNKNOWN;
  const text = count(Math.round(value));
  return text.includes(SPACE) ? `${text}B` : `${text}${SPACE}B`;
}

/** 1234567, "tokens" -> "1.23 M tokens" */
export function amount(value, unit) {
  return isKnown(value) ? `${count(value)}${SPACE}${unit}` : UNKNOWN;
}

/** 1, "worker" -> "1 worker"; 2 -> "2 workers" */
export function plural(value, word) {
  return `${value < 1e5 ? value : count(value)} ${word}${value === 1 ? "" : "s"}`;
}

/** Compare names in natural order: box-4 before box-14. */
export const natural = (a, b) => a.localeCompare(b, undefined, { numeric: true }) || (a < b ? -1 : Number(a > b));

/** Seconds: 75.2 -> "1 min 15 s" */
export function duration(seconds) {
  if (!isKnown(seconds)) return UNKNOWN;
  if (seconds < 9.95) return `${seconds.toFixed(1)}${SPACE}s`;
  if (seconds < 59.5) return `${seconds.toFixed(0)}${SPACE}s`;
  const minutes = Math.round(seconds / 60);
  if (seconds < 3570) return `${Math.floor(seconds / 60)}${SPACE}min ${Math.floor(seconds % 60)}${SPACE}s`;
  if (minutes < 48 * 60) return `${Math.floor(minutes / 60)}${SPACE}h ${minutes % 60}${SPACE}min`;
  return `${Math.floor(minutes / 1440)}${SPACE}days ${Math.round((minutes % 1440) / 60)}${SPACE}h`;
}

/** A countdown: 75.2 -> "1:15" */
export function countdown(seconds) {
  const whole = Math.max(0, Math.ceil(seconds));
  const parts = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60, whole % 60];
  const [hours, ...rest] = parts.map((part) => String(part).padStart(2, "0"));
  return parts[0] ? [hours, ...rest].join(":") : `${parts[1]}:${rest[1]}`;
}

export const loss = (value) => (isKnown(value) ? value.toFixed(4) : UNKNOWN);
export const share = (value) => (isKnown(value) ? `${(100 * value).toFixed(1)}${SPACE}%` : UNKNOWN);

/** A time in seconds since 1970 as the time of day, with the date if it is not today. */
export function moment(seconds) {
  const then = new Date(1000 * seconds);
  const today = then.toDateString() === new Date().toDateString();
  const time = then.toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit", hour12: false });
  return today ? time : `${then.toLocaleDateString([], { month: "short", day: "numeric" })} ${time}`;
}

export function median(values) {
  const sorted = [...values].sort((a, b) => a - b);
  const middle = sorted.length >> 1;
  if (!sorted.length) return null;
  return sorted.length % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
}
