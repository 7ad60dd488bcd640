// Sends one call to a gateway and follows it to its end. A run has one idempotency key and signs one payment at most, so that a
// request whose answer was lost is safe to send again: it makes no second call and no second payment. What stays unknown is told
// as unknown, since a caller who is told of a failure calls, and pays, once more.
import { isId } from "../../core/id.ts";
import { printable } from "../../core/text.ts";
import { systemClock } from "../../core/time.ts";
import api from "../../gateway/manual/api.md" with { type: "text" };
import { type Answer, OutboundError } from "../../http/client/exchange.ts";
import { retryAfterMs } from "../../http/client/outbound.ts";
import { STATUS, SUCCESS } from "../../http/responses.ts";
import { isJsonObject } from "../../wire/json.ts";
import { usdc } from "../../x402/network.ts";
import type { AccessRequest, CallView, GatewayAccess, GatewayAnswer } from "./access.ts";
import { ask, CALL_VIEW, fieldProblem, jsonOf, openAnswer, outboundError, readAnswer } from "./access.ts";
import type { SignedPayment } from "./payment.ts";

/** Exit statuses, beside 0 for success and 2 for a wrong command line. */
const EXIT = { failed: 1, refused: 3, unknown: 4 } as const;

/** Thrown when the run ends without a response that counts as success. */
export class RunEnd extends Error {
  readonly status: number;
  /** What --json prints; the message when it is left out. */
  readonly document: object | null;

  constructor(end: keyof typeof EXIT, problem: string, document: object | null = null) {
    super(shown(problem));
    this.status = EXIT[end];
    this.document = document;
  }
}

export interface CallRun {
  readonly access: GatewayAccess;
  readonly data: Uint8Array;
  readonly headers: Readonly<Record<string, string>>;
  readonly streams: boolean;
  readonly waitMs: number;
  readonly maxPrice: bigint;
  readonly payerKey: `0x${string}` | null;
  /** The path of the agent's calls; "" until the agent is known. */
  path: string;
  invocation: string | null;
  payment: SignedPayment | null;
  isSent: boolean;
  /** Whether a request may have arrived whose answer is not known. */
  isInDoubt: boolean;
  /** What has been printed of the response: its last byte, and whether the rest is kept from a terminal. */
  readonly output: { readonly decoder: TextDecoder; last: number | undefined; isCut: boolean };
}

/** A gateway chooses parts of what is told, and may choose long ones. */
const shown = (text: string) => printable(text.slice(0, 2000));
/** A part of a line, which must not cut off what follows it. */
const shortened = (text: string) => text.slice(0, 300);

export const tell = (text: string) => void process.stderr.write(`tollgate call: ${shown(text)}\n`);
/** Progress, which only a person wants to see; it overwrites the line of the clock. */
const say = (text: string) => void (process.stderr.isTTY && process.stderr.write(`\r\x1b[K${shown(text)}\n`));

/** The end of a run whose request the gateway did not take. */
export const refused = (run: CallRun, answer: GatewayAnswer): RunEnd =>
  new RunEnd("refused", whatCame(run, answer, `the gateway refused the call (${answer.status})`));

function whatCame({ access: { url } }: CallRun, answer: GatewayAnswer, did = `it answered ${answer.status}`): string {
  const { status, headers, text } = answer;
  const { pathname } = new URL(url);
  const isElsewhere = status === STATUS.not_found && pathname !== "/";
  const hint = isElsewhere ? `; --url has the path ${pathname}, so ${pathname}/v1/… was asked for: check it` : "";
  const reason = reasonIn(answer);
  // A gateway sends this header with every answer, and no body where it has nothing to say.
  const isGateways = headers.has("x-request-id") && status >= 400 && (reason !== "" || text === "");
  if (!isGateways) return `${noGateway(url, `it answered ${status}${reason}`)}${hint}`;
  return `${did}${status === STATUS.unauthenticated ? WRONG_TOKEN : reason}${hint}`;
}

const WRONG_TOKEN = ": the token has expired, was revoked, or belongs to another gateway";

export const noGateway = (url: string, why: string) => `${url} is not a tollgate gateway: check --url (${why})`;

function reasonIn({ status, headers, body, unread }: GatewayAnswer): string {
  if (unread !== undefined) return `; the body of the answer can't be read: ${unread}`;
  const location = headers.get("location");
  if (status < 400 && location !== null)
    return ` with a redirect to ${shortened(location)}, which is not followed, since the token goes to no other host`;
  return isJsonObject(body) && typeof body["error"] === "string" ? `: ${shortened(body["error"])}` : "";
}

/** What to do about a failed connection, by its error code. */
const CONNECTION_HINTS: readonly (readonly [code: RegExp, hint: (url: string) => string])[] = [
  [/ENOTFOUND|DNS|Invalid/, () => ": check --url"],
  [/CERT|SELF_SIGNED|UNABLE_TO|HOSTNAME/, () => ": TOLLGATE_CA_FILE names a file with the CA to trust"],
  [/_SSL_|EPROTO/, (url) => `: it may speak plain http: --url ${url.replace("https:", "http:")}`],
  [
    /ECONNRESET/,
    (url) => (url.startsWith("http:") ? `: it may speak https: --url ${url.replace("http:", "https:")}` : ""),
  ],
];

export function unreached({ access: { url } }: CallRun, { message }: OutboundError): RunEnd {
  if (message.endsWith("REFUSED")) {
    const advice = "start the gateway (tollgate serve), or name another one with --url";
    return new RunEnd("refused", `nothing listens at ${url}: ${advice}`);
  }
  const hint = CONNECTION_HINTS.find(([code]) => code.test(message))?.[1](url) ?? "";
  return new RunEnd("refused", `there is no answer from ${url}: ${message}${hint}`);
}

const invocationPath = ({ path, invocation }: CallRun) => `${path}/invocations/${invocation}`;

/** What is to be said of a call that has not ended. @param payment is added to it */
export function goesOn(run: CallRun, payment = ""): string {
  const url = `${run.access.url}${invocationPath(run)}`;
  return `the call goes on as ${run.invocation}${payment}; its result: curl -H "Authorization: Bearer $TOLLGATE_TOKEN" ${url}`;
}

/** What is to be said when the outcome of the request is not known. */
export function inDoubt({ payment, invocation }: CallRun): string {
  const call = invocation === null ? "it is unknown whether the gateway took the call" : `the call is ${invocation}`;
  if (payment === null) return call;
  const { value, from, nonce } = payment.authorization;
  const paid = `the payment of ${usdc(BigInt(value))} USDC by ${from} was taken`;
  return `${call}, and unknown whether ${paid}: look for payment_nonce ${nonce} in the history before you pay again`;
}

/** An answer of the gateway, or the agent's own response on its way, which is still to be read. */
export type CallAnswer = GatewayAnswer & { readonly stream?: Answer };
type MoreHeaders = Readonly<Record<string, string>>;

const INVOCATION = "x-service-invocation-id";

/** Sends the call, and pays for it if the gateway asks for a price that may be paid. @throws RunEnd, OutboundError */
export async function sendCall(run: CallRun, path: string, more: MoreHeaders = {}): Promise<CallAnswer> {
  const first = await sendSafely(run, path, more);
  if (isTaken(run, first)) return first;
  if (first.status !== STATUS.payment_required) throw notTaken(run, first);
  await sign(run, first.body);
  const paid = await sendSafely(run, path, more);
  if (!isTaken(run, paid)) throw notTaken(run, paid);
  const { transaction } = toldPayment(paid);
  if (typeof transaction === "string") say(`paid: transaction ${transaction}`);
  else if (paid.status !== STATUS.conflict) say("the payment is accepted, and not collected yet");
  return paid;
}

/** A 409 with the ID of a call says that an earlier request with the run's own key was taken. */
function isTaken({ streams, invocation }: CallRun, { status, headers, stream }: CallAnswer): boolean {
  if (stream !== undefined || invocation === null) return stream !== undefined;
  return status === STATUS.conflict ? headers.has(INVOCATION) : !streams && status === SUCCESS.accepted;
}

function notTaken(run: CallRun, answer: CallAnswer): RunEnd {
  const { message } = refused(run, answer);
  // A 402 declines the payment, unless its header says that it was collected.
  const isOpen = isTaking(run, answer) || (run.isInDoubt && answer.status !== STATUS.payment_required);
  if (isOpen) return new RunEnd("unknown", `${message}; ${inDoubt(run)}`);
  if (run.payment === null) return new RunEnd("refused", message);
  // A signature can't be taken back.
  const { nonce, validBefore } = run.payment.authorization;
  const until = new Date(1000 * Number(validBefore)).toISOString();
  const signed = `the payment that was signed has payment_nonce ${nonce}, and is valid until ${until}`;
  return new RunEnd("refused", `${message}; ${signed}`);
}

/** Whether the answer says, though not as a gateway says it, that a call was taken or a payment collected. */
function isTaking({ invocation, payment }: CallRun, answer: CallAnswer): boolean {
  const { status } = answer;
  if (status === SUCCESS.accepted || (status < 400 && invocation !== null)) return true;
  return payment !== null && (status < 400 || toldPayment(answer)["success"] === true);
}

/** What the answer tells of the payment; no field is certain. */
function toldPayment({ headers }: CallAnswer): Readonly<Record<string, unknown>> {
  const told = jsonOf(Buffer.from(headers.get("x-payment-response") ?? "", "base64").toString());
  return isJsonObject(told) ? told : {};
}

/** Signs the one payment of the run, if its price is allowed. @throws RunEnd when it is not */
async function sign(run: CallRun, challenge: unknown): Promise<void> {
  const { accountOf, payableOffer, signPayment } = await import("./payment.ts");
  const offer = payableOffer(challenge);
  if (typeof offer === "string") throw new RunEnd("refused", `the call has a price, and nothing was paid: ${offer}`);
  const { network, terms } = offer;
  const price = usdc(terms.maxAmountRequired);
  const asked = `${price} USDC on ${network.title} to ${terms.payTo}`;
  if (terms.maxAmountRequired > run.maxPrice || run.payerKey === null) {
    const limit = run.payerKey === null ? "there is no key to pay with" : `--max-price is ${usdc(run.maxPrice)}`;
    const way =
      run.payerKey === null ? `add --payer-key-file FILE --max-price ${price}` : `raise --max-price to ${price}`;
    const hint = `nothing was paid; to pay, ${way}`;
    throw new RunEnd("refused", `the call costs ${asked}, and ${limit}: ${hint}`);
  }
  const payer = accountOf(run.payerKey);
  say(`paying ${asked}, from ${payer.address}`);
  run.payment = await signPayment(offer, payer);
}

/** How often a request is sent that a busy gateway refuses, and that it has certainly not taken. */
const TRIES = 4;

/** Sends the request until it is known what became of it. @throws RunEnd when that stays unknown; OutboundError */
async function sendSafely(run: CallRun, path: string, more: MoreHeaders): Promise<CallAnswer> {
  // A paid call is answered once it is settled, however short the wait for its result is.
  const until = performance.now() + Math.max(run.waitMs, 60_000);
  for (let [tries, pauseMs] = [1, 250]; ; tries++, pauseMs = Math.min(2 * pauseMs, 5000)) {
    const outcome = await sendOnce(run, path, more, until).catch(outboundError);
    run.isInDoubt ||= mayHaveArrived(run, outcome);
    const isLast = performance.now() >= until || (tries === TRIES && !run.isInDoubt);
    if (!isPassing(run, outcome) || (isLast && !run.isInDoubt)) {
      if (outcome instanceof OutboundError) throw outcome;
      return outcome;
    }
    if (isLast) throw new RunEnd("unknown", inDoubt(run));
    const header = outcome instanceof OutboundError ? null : outcome.headers.get("retry-after");
    const pause = Math.max(retryAfterMs(header, systemClock.now(), 5000) ?? 0, pauseMs);
    await Bun.sleep(Math.min(pause, Math.max(until - performance.now(), 0)));
  }
}

/** A 503 to an unpaid request refuses it; after a payment has left, it may mean that the outcome of the payment is unknown. */
function mayHaveArrived({ payment }: CallRun, outcome: CallAnswer | OutboundError): boolean {
  if (outcome instanceof OutboundError) return outcome.kind === "lost";
  const { status, stream } = outcome;
  return stream === undefined && status >= 500 && (status !== STATUS.unavailable || payment !== null);
}

function isPassing({ isInDoubt }: CallRun, outcome: CallAnswer | OutboundError): boolean {
  if (outcome instanceof OutboundError) return isInDoubt;
  const { status, stream } = outcome;
  return stream === undefined && (status >= 500 || (isInDoubt && status === STATUS.rate_limited));
}

async function sendOnce(run: CallRun, path: string, more: MoreHeaders, until: number): Promise<CallAnswer> {
  const payment = run.payment === null ? {} : { "x-payment": run.payment.header };
  const timeout = new AbortController();
  const timer = setTimeout(() => timeout.abort(new Error("timeout")), Math.max(until - performance.now(), 1000));
  const request: AccessRequest = {
    ...{ method: "POST", path, body: run.data, signal: timeout.signal },
    headers: { ...run.headers, ...more, ...payment },
  };
  try {
    run.isSent = true;
    const answer = await openAnswer(run.access, request);
    const { status, headers } = answer;
    const id = headers.get(INVOCATION);
    if (id !== null && isId("inv", id)) run.invocation = id;
    const warning = headers.get("x-service-policy-warning");
    if (warning !== null) tell(`policy warning: ${warning}`);
    if (run.streams && isOfAgent(run, answer)) return { status, headers, text: "", body: undefined, stream: answer };
    return await readAnswer(answer, request);
  } finally {
    clearTimeout(timer);
  }
}

/** Whether the answer to a streamed call is the agent's, and not a refusal of a call that was recorded before. */
function isOfAgent(run: CallRun, { status, headers }: Answer): boolean {
  if (!headers.has(INVOCATION)) return false;
  const isOpen = status === STATUS.unavailable || status === STATUS.payment_required;
  if (isOpen && (run.payment !== null || run.isInDoubt))
    return headers.has("x-payment-response") && status !== STATUS.payment_required;
  return !(run.isInDoubt && status === STATUS.conflict);
}

/** Waits for the end of the call. @throws RunEnd when the wait runs out, or the gateway refuses to tell */
export async function awaitEnd(run: CallRun): Promise<CallView> {
  say(`the call is ${run.invocation}`);
  const until = performance.now() + run.waitMs;
  let view: CallView | null = null;
  for (let [left, pauseMs] = [run.waitMs, 250]; left > 0; left = until - performance.now()) {
    const seen = await askForEnd(run, Math.min(Math.ceil(left / 1000), 60));
    if (seen !== null && seen.status !== "pending" && seen.status !== "running") return seen;
    view = seen ?? view;
    await Bun.sleep(Math.min(pauseMs, Math.max(until - performance.now(), 0)));
    pauseMs = seen === null ? Math.min(2 * pauseMs, 5000) : 250;
  }
  const payment = view?.settlement?.status === "pending" ? ", and its payment is open: don't pay again" : "";
  const ended = run.waitMs === 0 ? "--wait is 0" : "timed out waiting";
  throw new RunEnd("unknown", `${ended}: ${goesOn(run, payment)}`, view);
}

/** The call as it is after so many seconds, or at its end; null when asking later may help. @throws RunEnd */
export async function askForEnd(run: CallRun, seconds: number): Promise<CallView | null> {
  const signal = AbortSignal.timeout(1000 * seconds + 10_000);
  const request = { method: "GET", path: invocationPath(run), headers: { prefer: `wait=${seconds}` }, signal } as const;
  const answer = await ask(run.access, request).catch(outboundError);
  if (answer instanceof OutboundError || answer.status >= 500 || answer.status === STATUS.rate_limited) return null;
  const problem = answer.status === SUCCESS.ok ? viewProblem(answer.body) : whatCame(run, answer);
  if (problem === null) return answer.body as CallView;
  throw new RunEnd("unknown", `the state of the call can't be read (${problem}); ${goesOn(run)}`);
}

function viewProblem(view: unknown): string | null {
  const problem = fieldProblem(CALL_VIEW, view);
  if (problem !== null) return problem;
  const { response_body_b64: body = "" } = view as CallView;
  // The decoder skips what is not base64.
  return Buffer.from(body, "base64").toString("base64") === body ? null : "response_body_b64 is not valid";
}

/** What the manual's page on the API says of the reason, without the targets of its links. */
function explained(detail: string): string {
  const [, sentence = ""] = new RegExp(`^\\| \`${RegExp.escape(detail)}\` \\| (.+) \\|$`, "m").exec(api) ?? [];
  return sentence === "" ? detail : `${detail} (${sentence.replaceAll(/\[([^\]]+)\]\([^)]+\)/g, "$1")})`;
}

export function whyFailed({ invocation }: CallRun, view: CallView): RunEnd {
  const { error_class, error_detail, upstream_status } = view;
  const answered = upstream_status && upstream_status >= 400 && `the agent answered ${upstream_status}`;
  const reasons = [error_class, answered, error_detail && explained(error_detail), paymentIn(view)]
    .filter(Boolean)
    .join(", ");
  return new RunEnd("failed", `the call ${invocation} failed: ${reasons || "no reason is known"}`, view);
}

/** The end of a streamed call whose response ended early, or was lost. @param view null when it is not known */
export function cutShort(run: CallRun, view: CallView | null, problem: string): RunEnd {
  if (view?.status === "failed") return whyFailed(run, view);
  if (view?.status !== "succeeded") {
    const doubt = run.payment === null ? "" : `; ${inDoubt(run)}`;
    return new RunEnd("failed", `${problem}${doubt}`);
  }
  tellUncollected(run, view);
  const payment = paymentIn(view);
  return new RunEnd("failed", `the call succeeded${payment === null ? "" : `, ${payment}`}, and ${problem}`);
}

function paymentIn({ settlement }: CallView): string | null {
  if (settlement?.status === "settlement_failed")
    return `its payment was not collected (${settlement.reason ?? "declined"})`;
  if (settlement?.status === "pending") return "its payment is open: don't pay again";
  return settlement?.tx_hash ? `its payment was taken (transaction ${settlement.tx_hash})` : null;
}

/** Notes that a payment stays with the payer. */
export function tellUncollected({ payment }: CallRun, { settlement }: CallView): void {
  if (payment !== null && settlement === null)
    tell("note: the tenant has no facilitator: the payment was checked and not collected");
}
