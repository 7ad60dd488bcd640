// One attempt to settle a payment through the tenant's facilitator: the credential, the request, and what its answer
// means. It never rejects, since whatever goes wrong on the way leaves the outcome unknown. The facilitator's own
// words stay here.
import { exchangeJson } from "../../http/fetch-json.ts";
import { type Outbound, OutboundError } from "../../http/outbound.ts";
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
  /** The secret that a credential stands for now, for a request to this URL, and the header that its type makes of it. */
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
  /** Notes durably that the payment may leave from now on. False when it must not. */
  mayLeave(): Promise<boolean>;
}

export interface FacilitatorClient {
  /** @param stop ends the attempt early, with its outcome unknown */
  settle(attempt: SettleAttempt, stop: AbortSignal): Promise<SettleOutcome>;
}

export function createFacilitatorClient(options: FacilitatorClientOptions): FacilitatorClient {
  const { outbound, timeoutMs, openSecret } = options;

  async function credentialOf({ tenant, facilitator_credential_ref }: SettleAttempt, url: string) {
    const opened = await openSecret(tenant, facilitator_credential_ref, url);
    const tls = clientIdentity(opened.secret);
    const header = tls === null ? opened.header() : null;
    return { tls, headers: header === null ? [] : [[header.name, header.value] as const] };
  }

  /** @param dialled told when from now on the payment may leave */
  async function ask(
    attempt: SettleAttempt,
    signal: AbortSignal,
    dialled: () => void,
  ): Promise<SettleOutcome> {
    const url = settleUrl(attempt.facilitator_url);
    const { tls, headers } = await credentialOf(attempt, url);
    signal.throwIfAborted();
    if (!(await attempt.mayLeave())) throw new Error("not to be sent any more");
    signal.throwIfAborted();
    dialled();
    const { status, body } = await exchangeJson(
      outbound,
      url,
      {
        method: "POST",
        headers: [["content-type", "application/json"], ...headers],
        body: new TextEncoder().encode(attempt.settle_request),
        tls,
        tenant: attempt.tenant,
        signal,
      },
      ANSWER_BYTES_MAX,
    );
    return outcomeOf(status, body, attempt.expected);
  }

  return {
    async settle(attempt, stop) {
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
        // Reading the secret heeds no signal.
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

function settleUrl(facilitatorUrl: string): string {
  return `${facilitatorUrl.replace(/\/+$/, "")}/settle`;
}
