// Judging a payment: ours beside viem's recovery of the signer. They take turns of a fraction of a second, so that
// whatever else the machine does meanwhile slows all of them alike. When many are judged at a time, a worker judges them,
// and the main thread is left with what handing them over takes.

import { recoverTypedDataAddress } from "viem";
import { startComputeThreads } from "../../src/compute/threads.ts";
import { silentLog } from "../../src/core/log.ts";
import { decodePaymentHeader, parseSettleRequest, type SettleRequest } from "../../src/x402/codec.ts";
import type { Payment, Requirements } from "../../src/x402/types.ts";
import { checkRequirements, checkSignature, checkWindow, createVerifier } from "../../src/x402/verify.ts";
import { newPayer, type SignedPayment, signPayment, TRANSFER_TYPES } from "../support/chain/payments.ts";
import { BASE } from "../support/network.ts";
import { coreSecondsIn, ownCoreSeconds } from "./cores.ts";
import { perSecond, type Rate, type Report } from "./report.ts";
import type { Figures } from "./table.ts";

const PAYERS = 8;
const PAYMENTS_OF_EACH = 32;
const PRICE = 10_000n;
const TURN_MS = 250;
const MARGIN_SECONDS = 6;
/** As many as come in over the connections of a busy gateway. */
const MANY = 128;

export interface Sample {
  readonly signed: SignedPayment;
  readonly request: SettleRequest;
}

export interface Contender {
  readonly name: string;
  /** False when it finds the payment bad, which none of them may. */
  readonly judge: (sample: Sample) => boolean | Promise<boolean>;
  /** How many at a time. */
  readonly parallel: number;
  /** The directory that others who do part of its work live in. */
  readonly helpersIn?: string;
}

export async function samples(): Promise<Sample[]> {
  const to = newPayer().address;
  const payers = Array.from({ length: PAYERS }, newPayer);
  const signed = await Promise.all(
    payers.flatMap((payer) => Array.from({ length: PAYMENTS_OF_EACH }, () => signPayment(payer, { to, value: PRICE }))),
  );
  return signed.map((each) => {
    const request = parseSettleRequest(each.settleRequest);
    if (!request.ok) throw new Error(request.reason);
    return { signed: each, request: request.value };
  });
}

function isGood(payment: Payment, requirements: Requirements): boolean {
  const now = Math.floor(Date.now() / 1000);
  return (
    checkWindow(payment.authorization, now, MARGIN_SECONDS) === null &&
    checkRequirements(BASE, payment, requirements, { exactValue: true }) === null &&
    checkSignature({ domain: BASE.token.domain, ...payment }) === "payer"
  );
}

function fromHeader({ signed, request }: Sample): boolean {
  const payment = decodePaymentHeader(signed.header);
  return payment.ok && isGood(payment.value, request.requirements);
}

const DOMAIN = {
  name: BASE.token.name,
  version: BASE.token.version,
  chainId: BASE.chainId,
  verifyingContract: BASE.token.address,
} as const;

async function byViem({ request: { payment } }: Sample): Promise<boolean> {
  const { authorization, signature } = payment;
  const primaryType = "TransferWithAuthorization";
  const message = authorization;
  const signer = await recoverTypedDataAddress({
    domain: DOMAIN,
    types: TRANSFER_TYPES,
    primaryType,
    message,
    signature,
  });
  return signer.toLowerCase() === authorization.from;
}

interface Turn extends Rate {
  /** Seconds of the main thread. */
  readonly main: number;
}

/** Runs it for a turn, in so many strands. What it takes is time of a core, wherever that was spent. */
async function turn({ name, judge, parallel, helpersIn }: Contender, all: readonly Sample[]): Promise<Turn> {
  const endAt = performance.now() + TURN_MS;
  const before = coreSeconds(helpersIn);
  const main = process.threadCpuUsage();
  let count = 0;
  const strand = async () => {
    while (performance.now() < endAt) {
      const sample = all[count++ % all.length];
      if (sample === undefined || !(await judge(sample))) throw new Error(`${name} refuses a good payment`);
    }
  };
  await Promise.all(Array.from({ length: parallel }, strand));
  const { user, system } = process.threadCpuUsage();
  return { count, seconds: coreSeconds(helpersIn) - before, main: (user + system - main.user - main.system) / 1e6 };
}

function coreSeconds(directory: string | undefined): number {
  return ownCoreSeconds() + (directory === undefined ? 0 : coreSecondsIn(directory));
}

/** @param seconds that they take all together, about. Gives what each does with a second of one core. */
export async function compare(
  contenders: readonly Contender[],
  all: readonly Sample[],
  seconds: number,
): Promise<Figures[]> {
  const totals = contenders.map(() => ({ count: 0, seconds: 0, main: 0 }));
  const rounds = Math.max(1, Math.round((seconds * 1000) / (TURN_MS * contenders.length)));
  // The first round warms up.
  for (let round = 0; round <= rounds; round++) {
    for (const [index, contender] of contenders.entries()) {
      const { count, seconds, main } = await turn(contender, all);
      const total = totals[index];
      if (round === 0 || total === undefined) continue;
      total.count += count;
      total.seconds += seconds;
      total.main += main;
    }
  }
  return totals.map((total) => ({
    rate: perSecond(total),
    cpu_us: (total.seconds * 1e6) / total.count,
    main_us: (total.main * 1e6) / total.count,
  }));
}

export const OURS: Contender = {
  name: "digest, signer, window, requirements",
  judge: ({ request }) => isGood(request.payment, request.requirements),
  parallel: 1,
};

const VIEM: Contender = { name: "viem recoverTypedDataAddress: the signer only", judge: byViem, parallel: 1 };
const HEADER: Contender = { name: "the same from the X-PAYMENT header's text", judge: fromHeader, parallel: 1 };

/** @param seconds that it takes, about */
export async function verification(seconds: number, report: Report): Promise<void> {
  const all = await samples();
  const [verifier, stopThreads] = [createVerifier(BASE.token.domain), startComputeThreads(silentLog)];
  const many: Contender = {
    name: `the signer only, ${MANY} at a time`,
    judge: async ({ request }) => (await verifier.signedBy("bench", request.payment)) === "payer",
    parallel: MANY,
  };
  const contenders = [VIEM, OURS, HEADER, many];
  const [viem = {}, ours = {}, header = {}, handed = {}] = await compare(contenders, all, 2.5 * seconds);
  stopThreads();
  const floor = report.add(VIEM.name, viem, { note: "by one core" });
  report.add(OURS.name, ours, { floor: [floor, "rate"] });
  report.add(HEADER.name, header, { floor: [floor, "rate"] });
  report.add(many.name, handed, { floor: [floor, "rate"], note: "by two threads" });
}
