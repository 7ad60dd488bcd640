// The client of a tenant's facilitator: sends one settle request with the tenant's credential, and interprets the answer. It
// never rejects: a failure before the payment was sent is `unsent`, and any later one `unknown`. The facilitator's own
// messages are not passed on.
import { createPrivateKey, type KeyObject, type X509Certificate } from "node:crypto";
import { parseCertificates } from "../../core/certificates.ts";
import type { Span } from "../../core/tracing.ts";
import type { ClientIdentity } from "../../http/client/connections.ts";
import { OutboundError } from "../../http/client/exchange.ts";
import { exchangeJson, type Outbound, type OutboundRequest } from "../../http/client/outbound.ts";
import { MAX } from "../../kernel/limits.ts";
import { type StopSignal, unlessAborted, untilFirst } from "../../kernel/wait.ts";
import type { CredentialHeader } from "../upstream/headers.ts";
import { type Expected, outcomeOf, type SettleOutcome } from "./outcome.ts";
import type { OpenPayment } from "./store.ts";

export interface FacilitatorClientOptions {
  readonly outbound: Outbound;
  /** Of the whole attempt, including the reading of the credential. */
  readonly timeoutMs: number;
  /** The credential's current secret, for a request to this URL, and the header that carries it. */
  openSecret(tenant: string, ref: string, url: string): Promise<{ secret: string; header(): CredentialHeader | null }>;
}

export interface SettleAttempt
  extends Pick<OpenPayment, "tenant" | "facilitator_url" | "facilitator_credential_ref" | "settle_request"> {
  readonly expected: Expected;
  /** Null where traces are off. */
  readonly span: Span | null;
  /** Called once connected, right before the payment is sent: records that durably. False when it must not be sent. */
  markSending(): Promise<boolean>;
}

export function createFacilitatorClient(options: FacilitatorClientOptions) {
  const { outbound, timeoutMs, openSecret } = options;

  async function credentialOf({ tenant, facilitator_credential_ref }: SettleAttempt, url: string) {
    const opened = await openSecret(tenant, facilitator_credential_ref, url);
    const tls = clientIdentity(opened.secret);
    const header = tls === null ? opened.header() : null;
    return { tls, headers: header === null ? [] : [[header.name, header.value] as const] };
  }

  /** @param onSend called right before the payment is sent */
  async function ask(attempt: SettleAttempt, signal: StopSignal, onSend: () => void): Promise<SettleOutcome> {
    const url = `${attempt.facilitator_url.replace(/\/+$/, "")}/settle`;
    const { tls, headers } = await credentialOf(attempt, url);
    signal.throwIfAborted();
    const leaving = async () => {
      if (!(await attempt.markSending())) throw new Error("not to be sent any more");
      signal.throwIfAborted();
      onSend();
    };
    const request: OutboundRequest = {
      method: "POST",
      headers: [["content-type", "application/json"], ...headers, ...(attempt.span?.headers ?? [])],
      body: new TextEncoder().encode(attempt.settle_request),
      tls,
      tenant: attempt.tenant,
      signal,
      leaving,
    };
    const answer = await exchangeJson(outbound, url, request, MAX.facilitatorBytes);
    attempt.span?.set({ status: answer.status });
    return outcomeOf(answer, attempt.expected);
  }

  return {
    /** @param stop ends the attempt early, with its outcome unknown */
    settle: (attempt: SettleAttempt, stop: AbortSignal): Promise<SettleOutcome> =>
      untilFirst([stop, AbortSignal.timeout(timeoutMs)], async (end) => {
        let isSent = false;
        const onSend = () => {
          isSent = true;
        };
        try {
          // Reading the secret can't be aborted, so the whole attempt is raced against the signal.
          return await unlessAborted(end, ask(attempt, end, onSend));
        } catch (error) {
          if (end.aborted) return unanswered(new Error("no answer in time"), isSent, !stop.aborted);
          return unanswered(error, isSent, false);
        }
      }),
  };
}

/** The outcome of an attempt without an answer. @param isSent whether it was about to be sent @param isLate its time has run out */
function unanswered(failure: unknown, isSent: boolean, isLate: boolean): SettleOutcome {
  // The server may have closed the connection right before the first byte.
  const isUnreached = failure instanceof OutboundError && failure.kind === "unreached";
  const why = failure instanceof Error ? failure.message : "failed";
  if (!isSent || isUnreached) return { kind: "unsent", why };
  return { kind: "unknown", why, ...(isLate && { isSilent: true }) };
}

export type FacilitatorClient = ReturnType<typeof createFacilitatorClient>;

// A tenant's client certificate for its facilitator: a PEM bundle of the certificate, its private key and optionally
// the server's CA, told apart by their content, in any order. No error message repeats any part of the bundle.

/** Matches in linear time: each search ends where the next block begins. */
const KEY = /-----BEGIN ([A-Z0-9 ]{0,50}PRIVATE KEY)-----(?:(?!-----BEGIN)[\s\S])*?-----END \1-----/;

/** The client identity that a secret is; null when it is no PEM bundle. @throws Error when the bundle can't be used */
export function clientIdentity(secret: string): ClientIdentity | null {
  const key = KEY.exec(secret)?.[0];
  const certificates = key === undefined ? [] : certificatesIn(secret);
  if (key === undefined || certificates.length === 0) return null;
  const leaf = leafOf(certificates, key);
  const others = certificates.filter((certificate) => certificate !== leaf);
  const chain = intermediatesOf(leaf, others);
  const roots = others.filter((certificate) => certificate.ca && !chain.includes(certificate));
  return {
    cert: [leaf, ...chain].map(String).join(""),
    key: `${key}\n`,
    ca: roots.length === 0 ? null : roots.map(String).join(""),
  };
}

function certificatesIn(secret: string): X509Certificate[] {
  try {
    return parseCertificates(secret);
  } catch {
    throw new Error("the bundle holds a certificate that can't be read");
  }
}

function leafOf(certificates: readonly X509Certificate[], keyPem: string): X509Certificate {
  const key = privateKey(keyPem);
  const leaf = certificates.find((certificate) => certificate.checkPrivateKey(key));
  if (leaf === undefined) throw new Error("no certificate of the bundle belongs to its private key");
  return leaf;
}

function privateKey(pem: string): KeyObject {
  let key: KeyObject;
  try {
    key = createPrivateKey(pem);
  } catch {
    throw new Error("the bundle's private key can't be read");
  }
  if ((key.asymmetricKeyDetails?.modulusLength ?? 0) <= MAX.rsaBits) return key;
  throw new Error(`the bundle's private key is longer than ${MAX.rsaBits} bits`);
}

/** The chain from the leaf towards its root, without the root, which the server has. */
function intermediatesOf(leaf: X509Certificate, others: readonly X509Certificate[]): X509Certificate[] {
  const chain: X509Certificate[] = [];
  for (let at: X509Certificate | undefined = leaf; at !== undefined; ) {
    const subject: X509Certificate = at;
    at = others.find((other) => !chain.includes(other) && !other.checkIssued(other) && subject.checkIssued(other));
    if (at !== undefined) chain.push(at);
  }
  return chain;
}
