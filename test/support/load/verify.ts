// Whether what callers were told, what upstreams saw, what moved on the chain and what the gateways have recorded agree.
import type { Transfer } from "../chain/chain.ts";
import type { Json, PayingTenant } from "../chain/paying.ts";
import type { Call } from "./callers.ts";
import type { CountingUpstream } from "./upstream.ts";

const PAGE = 100;
const QUIET_MS_MAX = 90_000;

export interface Evidence {
  readonly calls: readonly Call[];
  /** Everything that the tenant's history has, by ID. */
  readonly records: ReadonlyMap<string, Json>;
  readonly upstream: Pick<CountingUpstream, "of" | "visits">;
  readonly transfers: readonly Transfer[];
}

export interface Allowed {
  /** Gateways were killed or held up: calls may have ended as `internal`, and a note of a refusal may have been lost. */
  readonly gatewaysDied: boolean;
}

/** Waits until no call and no payment of the tenant is open, and reads the history. */
export async function quietRecords(tenant: Pick<PayingTenant, "send">): Promise<Map<string, Json>> {
  const totalOf = async (filter: string): Promise<number> => {
    const { status, body } = await tenant.send("GET", `/v1/invocations?limit=1&${filter}`);
    return status === 200 ? body.total : Number.NaN;
  };
  const until = performance.now() + QUIET_MS_MAX;
  for (;;) {
    const open = [
      await totalOf("status=pending"),
      await totalOf("status=running"),
      await totalOf("settlement=pending"),
    ];
    if (open.every((total) => total === 0)) break;
    if (performance.now() > until) throw new Error(`still open (pending, running, unsettled): ${open}`);
    await Bun.sleep(200);
  }
  const records = new Map<string, Json>();
  for (let offset = 0; ; offset += PAGE) {
    const { body } = await tenant.send("GET", `/v1/invocations?limit=${PAGE}&offset=${offset}`);
    for (const record of body.data) records.set(record.id, record);
    if (offset + PAGE >= body.total) return records;
  }
}

/** Every disagreement, in words. */
export function disagreements(evidence: Evidence, { gatewaysDied }: Allowed): string[] {
  return [
    ...evidence.calls.flatMap((call) => ofCall(call, evidence, gatewaysDied)),
    ...ofUpstream(evidence),
    ...ofMoney(evidence, gatewaysDied),
  ];
}

function ofCall(call: Call, { records, upstream }: Evidence, gatewaysDied: boolean): string[] {
  const { n, invocation, statuses, kind } = call;
  const told = `call ${n} (${kind}, answered ${statuses})`;
  const made = upstream.of(n);
  const problems: string[] = [];
  if (made.length > 1) problems.push(`${told} was made ${made.length} times, by ${made}`);
  if (invocation === null) {
    const isRefused = statuses.every((status) => status === 503 || status === 429);
    if (isRefused && made.length > 0 && !gatewaysDied) problems.push(`${told} was refused and made, by ${made}`);
    return problems;
  }
  const record = records.get(invocation);
  if (record === undefined) return [...problems, `${told} was accepted as ${invocation} and is lost`];
  if (made.some((id) => id !== invocation)) problems.push(`${told} was accepted as ${invocation} and made by ${made}`);
  if (record.status === "succeeded" && made.length === 0) problems.push(`${told} succeeded and was never made`);
  // A caller who waits for no gateway that is suspended leaves its stream, and so ends it.
  const mayFail = gatewaysDied ? ["internal", ...(kind === "streamed" ? ["cancelled"] : [])] : [];
  if (record.status === "failed" && !mayFail.includes(record.error_class)) {
    problems.push(`${told} has failed as ${record.error_class}: ${JSON.stringify(record.settlement)}`);
  }
  return problems;
}

function ofUpstream({ records, upstream }: Evidence): string[] {
  return [...upstream.visits].flatMap(([invocation, times]) => [
    ...(times > 1 ? [`${invocation} was made ${times} times`] : []),
    ...(records.has(invocation) ? [] : [`${invocation} was made and is not in the history`]),
  ]);
}

function ofMoney({ calls, records, upstream, transfers }: Evidence, gatewaysDied: boolean): string[] {
  const byNonce = Map.groupBy(transfers, ({ nonce }) => nonce);
  const paidRecords = new Map([...records.values()].map((record) => [record.payment_nonce, record]));
  return calls.flatMap(({ n, nonce }) => {
    if (nonce === null) return [];
    const moved = byNonce.get(nonce.toLowerCase() as typeof nonce) ?? [];
    const record = paidRecords.get(nonce.toLowerCase());
    const made = upstream.of(n).length;
    const problems: string[] = [];
    if (moved.length > 1) problems.push(`the payment of call ${n} moved ${moved.length} times`);
    if (made > 0 && moved.length === 0) problems.push(`call ${n} was made and not paid`);
    const isSettled = ["settled", "settled_upstream_failed"].includes(record?.settlement?.status);
    if (isSettled && moved[0]?.transaction_hash !== record.settlement.tx_hash) {
      problems.push(
        `call ${n} is ${record.settlement.status} by ${record.settlement.tx_hash}, and on chain ${moved[0]?.transaction_hash}`,
      );
    }
    if (moved.length > 0 && !isSettled)
      problems.push(`call ${n} was paid, and its record says ${JSON.stringify(record?.settlement)}`);
    // One that its dead gateway had claimed may have been made, and so it is never made again.
    if (moved.length > 0 && made === 0 && !(gatewaysDied && record?.error_class === "internal")) {
      problems.push(`call ${n} was paid and never made: ${record?.status} ${record?.error_class}`);
    }
    return problems;
  });
}

/** What was accepted within any span of time was no more than the bucket and what came into it, and one. */
export function rateExceeded(
  calls: readonly Call[],
  { rate, burst }: { readonly rate: number; readonly burst: number },
): string[] {
  const accepted = calls.filter(({ invocation }) => invocation !== null).toSorted((a, b) => a.sentAt - b.sentAt);
  let worst = 0;
  let words: string[] = [];
  for (const [i, first] of accepted.entries()) {
    const ends = accepted
      .slice(i)
      .map(({ answeredAt }) => answeredAt)
      .toSorted((a, b) => a - b);
    for (const [count, end] of ends.entries()) {
      const over = count + 1 - (burst + ((end - first.sentAt) / 1000) * rate + 1);
      if (over <= worst) continue;
      worst = over;
      words = [
        `${count + 1} calls of the limited agent were accepted within ${Math.round(end - first.sentAt)} ms, ${over.toFixed(1)} too many`,
      ];
    }
  }
  return words;
}
