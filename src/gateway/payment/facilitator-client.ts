// One attempt to settle a payment through the tenant's facilitator: the credential, the request, and the meaning of the
// answer. It never rejects: after any failure on the way the outcome is unknown. The facilitator's own words are not
// passed on.

import { createPrivateKey, type KeyObject, X509Certificate } from "node:crypto";
import type { Span } from "../../core/tracing.ts";
import type { ClientIdentity } from "../../http/client/connections.ts";
import { exchangeJson, type Outbound } from "../../http/client/outbound.ts";
import { MAX } from "../../kernel/limits.ts";
import { type Expected, outcomeOf, type SettleOutcome } from "./outcome.ts";

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
  /** Notes durably, on the connection, that the payment leaves from now on. False when it must not. */
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

  /** @param left called right before the payment is sent */
  async function ask(attempt: SettleAttempt, signal: AbortSignal, left: () => void): Promise<SettleOutcome> {
    const url = settleUrl(attempt.facilitator_url);
    const { tls, headers } = await credentialOf(attempt, url);
    signal.throwIfAborted();
    const leaving = async () => {
      if (!(await attempt.mayLeave())) throw new Error("not to be sent any more");
      signal.throwIfAborted();
      left();
    };
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
        leaving,
      },
      MAX.facilitatorBytes,
    );
    attempt.span?.set({ status: answer.status });
    return outcomeOf(answer, attempt.expected);
  }

  return {
    /** @param stop ends the attempt early, with its outcome unknown */
    async settle(attempt: SettleAttempt, stop: AbortSignal): Promise<SettleOutcome> {
      const ended = Promise.withResolvers<SettleOutcome>();
      const controller = new AbortController();
      let hasLeft = false;
      const end = () => {
        ended.resolve({ kind: hasLeft ? "unknown" : "unsent", why: "no answer in time" });
        controller.abort();
      };
      const left = () => {
        hasLeft = true;
      };
      const timer = setTimeout(end, timeoutMs);
      stop.addEventListener("abort", end);
      if (stop.aborted) end();
      try {
        // Reading the secret can't be aborted, so it is raced.
        return await Promise.race([ended.promise, ask(attempt, controller.signal, left)]);
      } catch (error) {
        return {
          kind: hasLeft ? "unknown" : "unsent",
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

// A tenant's client certificate for its facilitator: one PEM text with the certificate, its private key and
// optionally the CA of the server. Which certificate is what is found out from the certificates themselves, so the
// order in the text does not matter. No message here repeats any part of the text.

const MARK = /-----(BEGIN|END) ([A-Z0-9 ]{1,64})-----/g;

interface PemBlock {
  readonly label: string;
  readonly text: string;
}

/** Mark by mark, so that no text takes longer than its length. */
function blocksOf(text: string): PemBlock[] {
  const blocks: PemBlock[] = [];
  let begin = { label: "", index: 0 };
  for (const { 0: mark, 1: side, 2: label = "", index } of text.matchAll(MARK)) {
    if (side === "BEGIN") begin = { label, index };
    else if (label === begin.label) blocks.push({ label, text: text.slice(begin.index, index + mark.length) });
  }
  return blocks;
}

/**
 * The client identity that a secret is; null when it is no PEM bundle.
 *
 * @throws Error when it is a bundle that can't be used
 */
export function clientIdentity(secret: string): ClientIdentity | null {
  const blocks = blocksOf(secret);
  const key = blocks.find(({ label }) => label.endsWith("PRIVATE KEY"));
  const pems = blocks.filter(({ label }) => label === "CERTIFICATE");
  if (key === undefined || pems.length === 0) return null;
  const certificates = pems.map(({ text }) => parsed(text));
  const leaf = leafOf(certificates, key.text);
  const others = certificates.filter((certificate) => certificate !== leaf);
  const chain = intermediatesOf(leaf, others);
  const roots = others.filter((certificate) => certificate.ca && !chain.includes(certificate));
  return {
    cert: [leaf, ...chain].map(String).join(""),
    key: `${key.text}\n`,
    ca: roots.length === 0 ? null : roots.map(String).join(""),
  };
}

function parsed(pem: string): X509Certificate {
  try {
    return new X509Certificate(pem);
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

/** What leads from the leaf towards its root, which the server has already. */
function intermediatesOf(leaf: X509Certificate, others: readonly X509Certificate[]): X509Certificate[] {
  const chain: X509Certificate[] = [];
  for (let at: X509Certificate | undefined = leaf; at !== undefined; ) {
    const subject: X509Certificate = at;
    at = others.find((other) => !chain.includes(other) && !other.checkIssued(other) && subject.checkIssued(other));
    if (at !== undefined) chain.push(at);
  }
  return chain;
}
