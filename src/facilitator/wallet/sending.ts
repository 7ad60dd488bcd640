// Which wallet sends a payment. It is chosen once, at the simulation, since a payer's code may accept the sender of the
// simulation only.

import type { Chain } from "../../chain/chain.ts";
import { quoteFees } from "../../chain/fees.ts";
import type { Authorization, Hex } from "../../x402/types.ts";
import type { ClaimedPayment } from "../payments/payments.ts";
import { type Gas, WalletNotHeld } from "../settle/ports.ts";
import type { WalletLeases } from "./leases.ts";
import type { PendingNonces } from "./pending.ts";
import type { ReadinessCheck } from "./readiness.ts";
import { type Sender, unavailable } from "./sender.ts";

/** Transactions of one key under way, in no block yet. */
export const IN_FLIGHT_MAX = 2000;
const BASE_FEE_AGE_MS = 1000;

interface SendingOptions {
  readonly chain: Chain;
  readonly pendingNonces: PendingNonces;
  readonly readiness: ReadinessCheck;
  readonly senders: ReadonlyMap<Hex, Sender>;
  readonly leases: Pick<WalletLeases, "holds">;
  /** Wei per gas. */
  readonly maxFee: bigint;
  /** Whether payments of this payer may share a transaction with others. */
  readonly mayShare: (payer: Hex) => Promise<boolean>;
}

export function createSending(options: SendingOptions) {
  const { chain, pendingNonces, readiness, senders, leases, maxFee, mayShare } = options;
  let turns = 0;

  const isHeld = ({ signer }: Sender) => leases.holds(signer.address);

  function loadOf(sender: Sender): number {
    return sender.waiting() + pendingNonces.load(sender.signer.address);
  }

  /**
   * The sender with the least to do; equal ones take turns. Those of this process come first, for others have to be handed
   * the payment. If none has gas, any will do, since it won't send then.
   */
  async function leastBusy(): Promise<Sender | undefined> {
    await readiness.readiness();
    const withGas = readiness.able().length > 0 ? readiness.able() : [...senders.values()];
    const held = withGas.filter(isHeld);
    const able = held.length > 0 ? held : withGas;
    const first = turns++ % able.length;
    const loads = [...able.slice(first), ...able.slice(0, first)].map((sender) => ({
      sender,
      load: loadOf(sender),
    }));
    return loads.sort((a, b) => a.load - b.load)[0]?.sender;
  }

  /** Wei that a transaction with that gas and signature may cost, at the fees of now. @throws Fault `unavailable` */
  async function costOf({ limit }: Gas, signature: Hex): Promise<bigint> {
    // The other fields of the transaction and its data take less than 640 bytes.
    const bytes = 640 + signature.length / 2;
    const [{ baseFee }, tip, below] = await Promise.all([
      chain.newest(BASE_FEE_AGE_MS),
      chain.tip(),
      chain.feeBelow(bytes),
    ]);
    return limit * (quoteFees(baseFee, tip, maxFee)?.maxFee ?? maxFee) + below;
  }

  /**
   * Simulated for the wallet that has the least to do, which is the one that sends it then.
   *
   * @throws Fault `unavailable`
   */
  async function simulate(authorization: Authorization, signature: Hex) {
    const sender = await leastBusy();
    if (sender === undefined) throw unavailable("no wallet");
    const { address } = sender.signer;
    const [simulation, isShareable] = await Promise.all([
      chain.simulate(authorization, signature, address),
      mayShare(authorization.from),
    ]);
    if (!simulation.ok) return simulation;
    return { ok: true as const, gas: { limit: simulation.gas, from: address, mayShare: isShareable } };
  }

  /** @param again it has been sent before */
  async function send(payment: ClaimedPayment, { limit, from, mayShare }: Gas, again: boolean): Promise<void> {
    if (!leases.holds(from)) throw new WalletNotHeld(from);
    const found = await readiness.readiness();
    if (!found.ready) throw unavailable(found.reason);
    const sender = readiness.able().find(({ signer }) => signer.address === from);
    if (sender === undefined) throw unavailable("gas wallet low");
    if (loadOf(sender) >= IN_FLIGHT_MAX) throw unavailable("too many payments under way");
    // What failed among others is sent alone, so that it can't fail because of a neighbour again.
    await sender.send({ payment, gas: limit, again, mayShare: mayShare && !again });
  }

  return {
    simulate,
    costOf,
    send,
    /** Whether this process works for a wallet that had gas at the last look. */
    canSend: (): boolean => readiness.able().some(isHeld),
  };
}
