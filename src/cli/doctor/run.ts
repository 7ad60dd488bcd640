// Runs checks side by side, each with a limit in time, and gives their findings in the order of the checks. A check that
// fails in a way of its own becomes a finding, which holds nothing of an error that may show a secret.
import { withDeadline } from "../../concurrency/deadline.ts";
import { StartupProblem } from "../../core/startup.ts";
import { OutboundError } from "../../http/outbound.ts";
import { type Finding, failure, findings, type Problem } from "./finding.ts";

export const CHECK_MS_MAX = 5_000;

export interface Check {
  readonly what: string;
  readonly look: () => Promise<Finding[]>;
  /** What it needs first, which has a limit of its own. */
  readonly after?: Promise<unknown>;
  readonly msMax?: number;
  /** What to do when it fails in a way that it does not tell of itself. */
  readonly advice?: string;
}

export async function runChecks(checks: readonly Check[]): Promise<Finding[]> {
  return (await Promise.all(checks.map(run))).flat();
}

async function run({ what, look, after, msMax = CHECK_MS_MAX, advice }: Check): Promise<Finding[]> {
  try {
    await after?.catch(() => {});
    return await inTime(look(), msMax);
  } catch (error) {
    return findings(what, [problemOf(error, advice)], "");
  }
}

export class TooLate extends Error {}

/** @throws what `problemOf` tells as too late */
export function inTime<T>(work: Promise<T>, msMax = CHECK_MS_MAX): Promise<T> {
  return withDeadline(msMax, work, () => new TooLate(`no answer within ${msMax / 1000} s`));
}

/** @param advice for what has none of its own */
export function problemOf(error: unknown, advice = "see to it, and look again"): Problem {
  if (error instanceof StartupProblem || error instanceof TooLate) return failure(error.message, advice);
  if (error instanceof OutboundError) return failure(error.message, outboundAdvice(error) ?? advice);
  return failure(`it can't be looked at (${nameOf(error)})`, advice);
}

const UNTRUSTED = /\b(UNABLE_TO_|SELF_SIGNED_|DEPTH_ZERO_|INVALID_CA)/;

function outboundAdvice({ kind, message }: OutboundError): string | null {
  if (kind === "blocked") return "TOLLGATE_ALLOW_HOSTS exempts a trusted host from the host rules";
  if (/\bCERT_HAS_EXPIRED/.test(message)) return "its certificate must be renewed";
  if (UNTRUSTED.test(message)) return "name its CA in TOLLGATE_CA_FILE, or in the bundle of the credential";
  return null;
}

/** A code or a class: the message of an error of some library may show anything. */
function nameOf(error: unknown): string {
  if (!(error instanceof Error)) return "unknown";
  return "code" in error && typeof error.code === "string" ? error.code : error.name;
}
