// Requests that tell, beside their answer, how long the server's certificate holds and what time it has.
import { systemClock } from "../../core/clock.ts";
import type { Outbound } from "../../http/outbound.ts";
import type { Problem } from "./finding.ts";
import { skewProblem, validityProblem } from "./rules.ts";

/** The Date header has whole seconds (RFC 9110, section 5.6.7). */
const HALF_SECOND_MS = 500;

export interface Observed {
  readonly outbound: Outbound;
  /** What is wrong with the certificate of the server that was asked. */
  certificateProblem(): Problem | null;
  /** The same of its clock. */
  clockProblem(): Problem | null;
  /** Milliseconds since the epoch; null when no connection with TLS was made. */
  certificateEnd(): number | null;
}

export function observed(outbound: Outbound): Observed {
  let end: number | null = null;
  let aheadMs: number | null = null;
  const certified = (validTo: number) => {
    end = validTo;
  };
  return {
    outbound: {
      async request(url, request) {
        const from = systemClock.now();
        const response = await outbound.request(url, { ...request, certified });
        const date = Date.parse(response.headers.get("date") ?? "");
        if (!Number.isNaN(date)) aheadMs = date + HALF_SECOND_MS - (from + systemClock.now()) / 2;
        return response;
      },
    },
    certificateProblem: () =>
      end === null
        ? null
        : validityProblem("its certificate", { from: 0, to: end }, systemClock.now(), "it must be renewed"),
    clockProblem: () => (aheadMs === null ? null : skewProblem("its clock", aheadMs, "set both clocks by NTP")),
    certificateEnd: () => end,
  };
}
