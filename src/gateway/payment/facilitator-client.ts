// One attempt to settle a payment through the tenant's facilitator: the credential, the request, and the meaning of the
// answer. It never rejects: after any failure on the way the outcome is unknown. The facilitator's own words are not
// passed on.
import type { Span } from "../../core/tracing.ts";
import { exchangeJson } from "../../http/client/fetch-json.ts";
import { type Outbound, OutboundError } from "../../http/client/outbound.ts";
import { clientIdentity } from "./bundle.ts";
import { type Expected, outcomeOf, type SettleOutcome } from "./outcome.ts";

const ANSWER_BYTES_MAX = 64 * 1024;

interface HeaderField {
  readonly name: string;
  readonly value: string;
}

export interface FacilitatorClientOptions {
  readonly outbound: Outbound;
  /** For the whole attempt, credential included. */
  readonly timeoutMs: number;
  /** The current secret of a credential, for a request to this URL, and the header that carries it. */
  openSecret(
    tenant: string,
    ref: string,
    url: string,
  ): Promise<{ readonly secret: string; header(): HeaderField | null }>;
}

export interface SettleAttempt {
  readonly tenant: string;
  readonly facilitator_url: string;
  readonly facilitator_credential_ref: string;
  /** JSON. */
  readonly settle_request: string;
  readonly expected: Expected;
  /** Null where traces are off. */
  readonly span: Span | null;
  /** Notes durably that the payment may leave from now on. False when it must not. */
  mayLeave(): Promise<boolean>;
}

export function createFacilitatorClient(options: FacilitatorClientOptions) {
  const { outbound, timeoutMs, openSecret } = options;

  async function credentialOf({ tenant, facilitator_credential_ref }: SettleAttempt, url: string) {
    const opened = await openSecret(tenant, facilitator_credential_ref, url);
    const tls = clientIdentity(opened.secret);
    const header = tls === null ? opened.header() : null;
    return { tls, headers: header === null ? [] : [[header.name, header.value] as const] };
  }

  /** @param dialled called right before the payment may be sent */
  async function ask(attempt: SettleAttempt, signal: AbortSignal, dialled: () => void): Promise<SettleOutcome> {
    const url = settleUrl(attempt.facilitator_url);
    const { tls, headers } = await credentialOf(attempt, url);
    signal.throwIfAborted();
    if (!(await attempt.mayLeave())) throw new Error("not to be sent any more");
    signal.throwIfAborted();
    dialled();
    const answer = await exchangeJson(
      outbound,
      url,
      {
        method: "POST",
        headers: [["content-type", "application/json"], ...headers, ...(attempt.span?.headers ?? [])],
        body: new TextEncoder().encode(attempt.settle_request),
        tls,
        tenant: attempt.tenant,
        signal,
      },
      ANSWER_BYTES_MAX,
    );
    attempt.span?.set({ status: answer.status });
    return outcomeOf(answer, attempt.expected);
  }

  return {
    /** @param stop ends the attempt early, with its outcome unknown */
    async settle(attempt: SettleAttempt, stop: AbortSignal): Promise<SettleOutcome> {
      const ended = Promise.withResolvers<SettleOutcome>();
      const controller = new AbortController();
      let isDialled = false;
      const end = () => {
        ended.resolve({ kind: isDialled ? "unknown" : "unsent", why: "no answer in time" });
        controller.abort();
      };
      const dialled = () => {
        isDialled = true;
      };
      const timer = setTimeout(end, timeoutMs);
      stop.addEventListener("abort", end);
      if (stop.aborted) end();
      try {
        // Reading the secret can't be aborted, so it is raced.
        return await Promise.race([ended.promise, ask(attempt, controller.signal, dialled)]);
      } catch (error) {
        const isUnsent = !isDialled || (error instanceof OutboundError && error.kind !== "lost");
        return {
          kind: isUnsent ? "unsent" : "unknown",
          why: error instanceof Error ? error.message : "failed",
        };
      } finally {
        clearTimeout(timer);
        stop.removeEventListener("abort", end);
      }
    },
  };
}

export type FacilitatorClient = ReturnType<typeof createFacilitatorClient>;

function settleUrl(facilitatorUrl: string): string {
  return `${facilitatorUrl.replace(/\/+$/, "")}/settle`;
}
