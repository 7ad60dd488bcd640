// The values of the facilitator's settings that are about the chain and about money: exact integers throughout,
// and hex in lower case, so that one thing has one spelling.
import type { Hex } from "../core/hex.ts";
import type { Kind } from "./values.ts";
import { httpUrl } from "./values.ts";

const UINT256_MAX = 2n ** 256n - 1n;

/** Atomic units of the token, or wei. */
export const amount: Kind<bigint> = {
  must: "a whole number of at most 256 bits, in decimal digits only",
  parse: parseAmount,
};

function parseAmount(text: string): bigint | undefined {
  if (!/^[0-9]{1,78}$/.test(text)) return undefined;
  const value = BigInt(text);
  return value <= UINT256_MAX ? value : undefined;
}

const GWEI_DECIMALS = 9;

/** A decimal number of gwei in wei, exactly. */
function parseGwei(text: string): bigint | undefined {
  const [, whole = "", fraction = ""] = /^([0-9]{1,6})(?:\.([0-9]{1,9}))?$/.exec(text) ?? [];
  if (whole === "") return undefined;
  const wei = BigInt(whole + fraction.padEnd(GWEI_DECIMALS, "0"));
  return wei > 0n ? wei : undefined;
}

export const gwei: Kind<bigint> = {
  must: "a decimal number of gwei above 0, like 5 or 0.5, with at most 6 digits before the point and 9 after it",
  parse: parseGwei,
};

const KEYS_MAX = 64;
/** The order of the group of secp256k1 (SEC 2, section 2.4.1): a private key is below it, and not 0. */
const SECP256K1_ORDER = 0xffffffff_ffffffff_ffffffff_fffffffe_baaedce6_af48a03b_bfd25e8c_d0364141n;

function parsePrivateKey(text: string): Hex | undefined {
  const digits = /^(?:0x)?([0-9a-f]{64})$/i.exec(text)?.[1]?.toLowerCase();
  if (digits === undefined) return undefined;
  const scalar = BigInt(`0x${digits}`);
  return scalar > 0n && scalar < SECP256K1_ORDER ? `0x${digits}` : undefined;
}

function listed(text: string): readonly string[] {
  return text.split(",").flatMap((entry) => entry.trim() || []);
}

/** All or nothing: if a key were left out silently, nobody would watch its money. */
function parseEach<T>(text: string, most: number, parse: (entry: string) => T | undefined): T[] | undefined {
  const entries = listed(text);
  const parsed = entries.flatMap((entry) => parse(entry) ?? []);
  const whole = parsed.length === entries.length && parsed.length > 0 && parsed.length <= most;
  return whole && new Set(parsed).size === parsed.length ? parsed : undefined;
}

export const privateKeys: Kind<readonly Hex[]> = {
  must: `a comma-separated list of 1 to ${KEYS_MAX} different private keys of secp256k1, each 32 bytes in hex`,
  parse: (text) => parseEach(text, KEYS_MAX, parsePrivateKey),
};

const URLS_MAX = 16;

export const rpcUrls: Kind<readonly string[]> = {
  must: `a comma-separated list of 1 to ${URLS_MAX} different http or https URLs without user and fragment`,
  parse: (text) => parseEach(text, URLS_MAX, httpUrl("query").parse),
};

function parseAddress(text: string): Hex | undefined {
  const digits = /^0x([0-9a-f]{40})$/i.exec(text)?.[1]?.toLowerCase();
  return digits === undefined || /^0+$/.test(digits) ? undefined : `0x${digits}`;
}

export const address: Kind<Hex> = { must: "an address: 0x and 40 hex digits", parse: parseAddress };
