// Strict readers of the payment protocol's JSON: each returns a value in the form of types.ts, or throws a
// Fault that names the field by its path. No message repeats a value, since a signature may stand in any field.
import { invalidField } from "../core/fault.ts";
import { textProblem } from "../core/text.ts";
import { MAX } from "../kernel/limits.ts";
import type { Authorization, Hex } from "./types.ts";

/** A JSON object, and where it stands: "" for the outermost. */
export interface FieldScope {
  readonly path: string;
  readonly fields: Readonly<Record<string, unknown>>;
}

/** Digits of the largest integer of 256 bits. */
export const UINT256_DIGITS_MAX = 78;
export const UINT256_MAX = 2n ** 256n - 1n;
const ADDRESS = /^0x[0-9a-fA-F]{40}$/;
const WORD = /^0x[0-9a-fA-F]{64}$/;
/** At least the 65 bytes of a plain signature: the 64 of EIP-2098 are no signature to the token. */
const SIGNATURE = /^0x(?:[0-9a-fA-F]{2}){65,}$/;

/** The outermost value. `name` is what a message calls it. */
export function outermost(value: unknown, name: string): FieldScope {
  return { path: "", fields: asFields(value, name) };
}

export function objectIn(place: FieldScope, key: string): FieldScope {
  const path = pathOf(place, key);
  return { path, fields: asFields(present(place, key), path) };
}

function asFields(value: unknown, name: string): FieldScope["fields"] {
  if (!isObject(value)) throw invalidField(name, "must be a JSON object");
  return value;
}

const isObject = (value: unknown): value is FieldScope["fields"] =>
  typeof value === "object" && value !== null && !Array.isArray(value);

const pathOf = ({ path }: FieldScope, key: string): string => (path === "" ? key : `${path}.${key}`);

/** Inherited keys are no fields: `Object.prototype` is not part of what was sent. */
function present(place: FieldScope, key: string): unknown {
  const value = Object.hasOwn(place.fields, key) ? place.fields[key] : undefined;
  if (value === undefined) throw invalidField(pathOf(place, key), "required");
  return value;
}

export function versionIn<V extends number>(place: FieldScope, version: V): V {
  if (present(place, "x402Version") !== version) {
    throw invalidField(pathOf(place, "x402Version"), `must be ${version}`);
  }
  return version;
}

/** A word such as a scheme or a network. The codec does not judge which ones are known. */
export const fieldName = (place: FieldScope, key: string): string => textIn(place, key, 64);

export function textIn(place: FieldScope, key: string, charactersMax: number): string {
  const value = present(place, key);
  if (typeof value !== "string") throw invalidField(pathOf(place, key), "must be a string");
  const problem = textProblem(value, { min: 1, max: charactersMax });
  if (problem !== null) throw invalidField(pathOf(place, key), problem);
  return value;
}

/** A string of decimal digits. JSON numbers are refused: a double does not hold 256 bits. */
export function uint256In(place: FieldScope, key: string): bigint {
  const value = present(place, key);
  const integer = typeof value === "string" && /^[0-9]+$/.test(value) ? uint256(value) : null;
  if (integer === null) {
    throw invalidField(pathOf(place, key), "must be a string of decimal digits, of at most 256 bits");
  }
  return integer;
}

/** Reading digits takes more than linear time, so their number is checked first. */
function uint256(digits: string): bigint | null {
  const significant = digits.replace(/^0+/, "");
  if (significant.length > UINT256_DIGITS_MAX) return null;
  const integer = BigInt(significant);
  return integer <= UINT256_MAX ? integer : null;
}

export function secondsIn(place: FieldScope, key: string): number {
  const value = present(place, key);
  if (typeof value !== "number" || !Number.isSafeInteger(value) || value < 0) {
    throw invalidField(pathOf(place, key), "must be an integer, not below 0");
  }
  return value;
}

export const addressIn = (place: FieldScope, key: string): Hex =>
  hexIn(place, key, ADDRESS, "must be an address of 0x and 40 hexadecimal digits");

export function signatureIn(place: FieldScope, key: string): Hex {
  const signature = hexIn(place, key, SIGNATURE, "must be 0x and the hexadecimal digits of at least 65 bytes");
  if (signature.length > 2 + 2 * MAX.signatureBytes) {
    throw invalidField(pathOf(place, key), `must be at most ${MAX.signatureBytes} bytes`);
  }
  return signature;
}

function hexIn(place: FieldScope, key: string, form: RegExp, problem: string): Hex {
  const value = present(place, key);
  if (typeof value !== "string" || !form.test(value)) throw invalidField(pathOf(place, key), problem);
  return lowerHex(value);
}

/** The one spelling in which hex is kept and compared. */
export const lowerHex = (text: string): Hex => `0x${text.slice(2).toLowerCase()}`;

/** Further keys are passed over, as the official schemas do: nobody signed them and nothing reads them. */
export function authorizationIn(place: FieldScope, key: string): Authorization {
  const authorization = objectIn(place, key);
  return {
    from: addressIn(authorization, "from"),
    to: addressIn(authorization, "to"),
    value: uint256In(authorization, "value"),
    validAfter: uint256In(authorization, "validAfter"),
    validBefore: uint256In(authorization, "validBefore"),
    nonce: hexIn(authorization, "nonce", WORD, "must be 0x and the 64 hexadecimal digits of 32 bytes"),
  };
}
