// Payments as they stand on the wire, what they are read as, and what takes the place of their fields.

import { type Parsed, requirementsOf } from "../../../src/x402/codec.ts";
import type { Payment } from "../../../src/x402/types.ts";
import { BASE } from "../network.ts";

export const SIGNATURE = `0x${"1a".repeat(64)}1b`;
export const PAYER = "0x857b06519E91e3A54538791bDbb0E22373e36b66";
export const PAYEE = "0x209693Bc6afc0C5328bA36FaF03C514EF312287C";
export const TRANSACTION = `0x${"7e".repeat(32)}`;

export const AUTHORIZATION = {
  from: PAYER,
  to: PAYEE,
  value: "10000",
  validAfter: "0",
  validBefore: "1900000000",
  nonce: `0x${"AB".repeat(32)}`,
};

export const V1 = {
  x402Version: 1,
  scheme: "exact",
  network: "base",
  payload: { signature: SIGNATURE, authorization: AUTHORIZATION },
};

export const WIRE = requirementsOf(BASE, {
  amount: 10_000n,
  payTo: PAYEE,
  resource: "https://gateway.example/v1/proxy/agent_1",
  description: "Weather – für alle",
});

export const V2 = {
  x402Version: 2,
  accepted: {
    scheme: "exact",
    network: "eip155:8453",
    amount: "10000",
    asset: WIRE.asset,
    payTo: PAYEE,
    maxTimeoutSeconds: 60,
    extra: WIRE.extra,
  },
  payload: { signature: SIGNATURE, authorization: AUTHORIZATION },
};

export const READ: Payment = {
  x402Version: 1,
  scheme: "exact",
  network: "base",
  authorization: {
    from: "0x857b06519e91e3a54538791bdbb0e22373e36b66",
    to: "0x209693bc6afc0c5328ba36faf03c514ef312287c",
    value: 10_000n,
    validAfter: 0n,
    validBefore: 1_900_000_000n,
    nonce: `0x${"ab".repeat(32)}`,
  },
  signature: `0x${"1a".repeat(64)}1b`,
};

export function base64(value: unknown): string {
  return Buffer.from(typeof value === "string" ? value : JSON.stringify(value)).toString("base64");
}

export function unbase64(text: string): unknown {
  return JSON.parse(Buffer.from(text, "base64").toString());
}

export function reason(parsed: Parsed<unknown>): string {
  return parsed.ok ? "accepted" : parsed.reason;
}

/** A copy with the value at a dotted path replaced, or without it. */
export function changed(value: object, path: string, to: unknown): object {
  const copy = structuredClone(value);
  const keys = path.split(".");
  const last = keys.pop() ?? "";
  const holder = keys.reduce<Record<string, unknown>>(
    (at, key) => at[key] as Record<string, unknown>,
    copy as Record<string, unknown>,
  );
  if (to === undefined) delete holder[last];
  else holder[last] = to;
  return copy;
}

export const INTEGER = "must be a string of decimal digits, of at most 256 bits";
export const ADDRESS = "must be an address of 0x and 40 hexadecimal digits";

export const NO_INTEGERS = [
  ...["", " ", "1 ", " 1", "+1", "-1", "1e3", "0x10", "1.0", "1_000", "1n", "٣", "1\n", "Infinity"],
  ...["9".repeat(79), (2n ** 256n).toString(), 1, 0, 1.5, null, true, [], ["1"], {}],
];
export const NO_ADDRESSES = [
  ...["", "0x", PAYER.slice(2), `0X${PAYER.slice(2)}`, `${PAYER}0`, PAYER.slice(0, -1), `${PAYER}\n`, ` ${PAYER}`],
  ...[`0x${"g".repeat(40)}`, 1, null, [PAYER], {}],
];
