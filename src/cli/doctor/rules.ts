// What is judged good, and what is not: the bounds of the doctor, apart from how anything is found out.
import { EXPIRY_WARNING_MS } from "../../config/pem.ts";
import { fitOf, type Schema, TOO_NEW_ADVICE, tooNewText } from "../../storage/schema-fit.ts";
import { newestVersion } from "../../storage/schema-versions.ts";
import { failure, type Problem, warning } from "./finding.ts";

const GIB = 1024 ** 3;
const FREE_BYTES_MIN = GIB;
const SKEW_MS_MAX = 30_000;
const DAY_MS = 86_400_000;

/** @param name of the file system, such as the directory that lies there */
export function freeSpaceProblem(name: string, freeBytes: number): Problem | null {
  const text = `${name} has ${bytesText(freeBytes)} free`;
  const advice = "make room: on a full disk no call is taken";
  if (freeBytes <= 0) return failure(text, advice);
  return freeBytes < FREE_BYTES_MIN ? warning(text, advice) : null;
}

export function bytesText(bytes: number): string {
  return bytes < GIB ? `${Math.floor(bytes / 1024 ** 2)} MiB` : `${(bytes / GIB).toFixed(1)} GiB`;
}

interface Validity {
  /** Milliseconds since the epoch. */
  readonly from: number;
  readonly to: number;
}

/**
 * @param which certificate, as in "its certificate"
 * @param advice what to do about one that ends
 */
export function validityProblem(which: string, { from, to }: Validity, now: number, advice: string): Problem | null {
  if (now < from) return failure(`${which} is not valid before ${timeText(from)}`, "set the clock, or wait");
  if (now > to) return failure(`${which} expired at ${timeText(to)}`, advice);
  if (now <= to - EXPIRY_WARNING_MS) return null;
  const days = Math.floor((to - now) / DAY_MS);
  return warning(`${which} expires in ${days} ${days === 1 ? "day" : "days"}, at ${timeText(to)}`, advice);
}

export function timeText(time: number): string {
  return Number.isFinite(time) ? new Date(time).toISOString() : "an unknown time";
}

/** @param aheadMs how far the clock of `whose` is ahead of this machine's */
export function skewProblem(whose: string, aheadMs: number, advice: string): Problem | null {
  if (Math.abs(aheadMs) <= SKEW_MS_MAX) return null;
  const seconds = Math.round(Math.abs(aheadMs) / 1000);
  return warning(`${whose} is ${seconds} s ${aheadMs > 0 ? "ahead of" : "behind"} this machine's clock`, advice);
}

/** Whether the program fits the schema, or what would become of it. */
export function schemaProblem(schema: Schema): Problem | null {
  const has = `it has schema version ${schema.version}`;
  const knows = `knows versions up to ${newestVersion()}`;
  switch (fitOf(schema)) {
    case "none":
    case "same":
      return null;
    case "older": {
      const text = `${has}, and the next start of this program brings it to ${newestVersion()}`;
      return warning(text, "take a backup, then start this program or run tollgate migrate");
    }
    case "newer":
      return warning(
        `${has}; this program ${knows}, and may run on it all the same`,
        "go on with the newer one in time",
      );
    case "too new":
      return failure(`it has ${tooNewText(schema)}`, TOO_NEW_ADVICE);
  }
}
