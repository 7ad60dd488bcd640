// Runs the doctor's checks and makes its report. Each finding is one line, and all of them decide the exit status. Checks run
// concurrently, each with a deadline, and are reported in order. A check that throws becomes a finding; the message of an error
// that may show a secret is left out. Judgements that several checks share, about certificates and clocks, are here too.
import { EXPIRY_WARNING_MS } from "../../config/pem.ts";
import { parseCertificates } from "../../core/certificates.ts";
import { errorName } from "../../core/fault.ts";
import { StartupProblem } from "../../core/startup.ts";
import { printable } from "../../core/text.ts";
import { DAY_MS, systemClock } from "../../core/time.ts";
import { OutboundError } from "../../http/client/exchange.ts";
import type { Outbound } from "../../http/client/outbound.ts";
import { withDeadline } from "../../kernel/wait.ts";

/** How many tenants or keys with one problem are named. */
export const NAMED_MAX = 3;

export interface Problem {
  /** `fail`: the service would refuse work. `warn`: it works, and the operator should do something about it. */
  readonly state: "warn" | "fail";
  readonly text: string;
  readonly advice: string;
}

export interface Finding {
  readonly what: string;
  readonly state: "ok" | Problem["state"];
  readonly text: string;
  readonly advice: string | null;
  /** The budgets of memory by what they are for, in MiB. Only the report of --json lists them. */
  readonly mib?: Readonly<Record<string, number>>;
}

export const warning = (text: string, advice: string): Problem => ({ state: "warn", text, advice });
export const failure = (text: string, advice: string): Problem => ({ state: "fail", text, advice });

/** A finding for each problem, or one that says `fine` if there is none. */
export function findings(what: string, problems: readonly (Problem | null)[], fine: string): Finding[] {
  const found = problems.filter((problem) => problem !== null);
  if (found.length === 0) return [{ what, state: "ok", text: fine, advice: null }];
  return found.map((problem) => ({ what, ...problem }));
}

export const notChecked = (what: string, without: string): Finding[] =>
  findings(what, [warning(`not checked without ${without}`, "fix that first")], "");

export const isHealthy = (found: readonly Finding[]): boolean => found.every(({ state }) => state !== "fail");

export function report(found: readonly Finding[]): string {
  // Names that tenants have chosen may be longer; they don't widen the column.
  const width = Math.min(Math.max(...found.map(({ what }) => what.length)), 60);
  const lines = found.map(({ what, state, text, advice }) => {
    const message = advice === null ? text : `${text}; ${advice}`;
    return `${state.padEnd(4)}  ${printable(what).padEnd(width)}  ${printable(message)}\n`;
  });
  return lines.join("");
}

export const CHECK_MS_MAX = 5_000;
/** The deadline of a check that waits for another one, such as the opening of the database, which has its own deadline. */
export const SECOND_CHECK_MS_MAX = 2 * CHECK_MS_MAX;

export interface Check {
  readonly what: string;
  readonly run: () => Promise<readonly Finding[]>;
  readonly msMax?: number;
  readonly advice?: string;
}

export async function runChecks(checks: readonly Check[]): Promise<readonly Finding[]> {
  const found = checks.map(async ({ what, run, msMax, advice }) =>
    inTime(run(), msMax).catch((error) => findings(what, [problemOf(error, advice)], "")),
  );
  return (await Promise.all(found)).flat();
}

export class TooLate extends Error {}

/** @throws TooLate */
export const inTime = <T>(work: Promise<T>, msMax = CHECK_MS_MAX): Promise<T> =>
  withDeadline(msMax, work, () => new TooLate(`no answer within ${msMax / 1000} s`));

/** @param advice for errors that suggest none */
export function problemOf(error: unknown, advice = "fix it, and run tollgate doctor again"): Problem {
  if (error instanceof StartupProblem || error instanceof TooLate) return failure(error.message, advice);
  if (error instanceof OutboundError) return failure(error.message, outboundAdvice(error) ?? advice);
  return failure(`it can't be checked (${errorName(error)})`, advice);
}

const UNTRUSTED = /\b(UNABLE_TO_|SELF_SIGNED_|DEPTH_ZERO_|INVALID_CA)/;

function outboundAdvice({ kind, message }: OutboundError): string | null {
  if (kind === "blocked") return "TOLLGATE_ALLOW_HOSTS exempts a trusted host from the host rules";
  if (/\bCERT_HAS_EXPIRED/.test(message)) return "its certificate must be renewed";
  if (/WRONG_VERSION_NUMBER/.test(message))
    return "it speaks plain HTTP there: name its TLS port (a facilitator's is TOLLGATE_PORT, not TOLLGATE_OPEN_PORT)";
  if (UNTRUSTED.test(message)) return "name its CA in TOLLGATE_CA_FILE, or in the bundle of the credential";
  return null;
}

/** Judges the validity of a certificate. Times are in milliseconds since the epoch. @param which as in "its certificate" */
export function validityProblem(which: string, from: number, to: number, now: number, advice: string): Problem | null {
  if (now < from) return failure(`${which} is not valid before ${timeText(from)}`, "set the clock, or wait");
  if (now > to) return failure(`${which} expired at ${timeText(to)}`, advice);
  if (now <= to - EXPIRY_WARNING_MS) return null;
  const days = Math.floor((to - now) / DAY_MS);
  return warning(`${which} expires in ${days} ${days === 1 ? "day" : "days"}, at ${timeText(to)}`, advice);
}

export function certificateProblems(which: string, pem: string, advice: string): (Problem | null)[] {
  return parseCertificates(pem).map(({ validFrom, validTo }) =>
    validityProblem(which, Date.parse(validFrom), Date.parse(validTo), systemClock.now(), advice),
  );
}

const timeText = (time: number): string => (Number.isFinite(time) ? new Date(time).toISOString() : "an unknown time");

/** @param aheadMs how far the clock of `whose` is ahead of this machine's */
export function skewProblem(whose: string, aheadMs: number, advice: string): Problem | null {
  if (Math.abs(aheadMs) <= 30_000) return null;
  const seconds = Math.round(Math.abs(aheadMs) / 1000);
  return warning(`${whose} is ${seconds} s ${aheadMs > 0 ? "ahead of" : "behind"} this machine's clock`, advice);
}

export const seconds = (ms: number): string => (Math.abs(ms) / 1000).toFixed(1);

/** Wraps an HTTP client so that its requests also observe when the server's certificate expires and what time the server has. */
export function observed(outbound: Outbound) {
  let end: number | null = null;
  let aheadMs: number | null = null;
  const certified = (validTo: number) => {
    end = validTo;
  };
  const watched: Outbound = {
    async request(url, request) {
      const from = systemClock.now();
      const response = await outbound.request(url, { ...request, certified });
      const date = Date.parse(response.headers.get("date") ?? "");
      // The Date header has whole seconds (RFC 9110, section 5.6.7).
      if (!Number.isNaN(date)) aheadMs = date + 500 - (from + systemClock.now()) / 2;
      return response;
    },
  };
  return {
    outbound: watched,
    /** What is wrong with the certificate of the last server. */
    certificateProblem: () =>
      end === null ? null : validityProblem("its certificate", 0, end, systemClock.now(), "it must be renewed"),
    clockProblem: () => (aheadMs === null ? null : skewProblem("its clock", aheadMs, "set both clocks by NTP")),
  };
}
