// The mixed-case checksum of addresses (EIP-55), which official clients insist on.
import { keccak_256 } from "@noble/hashes/sha3";
import { asBuffer } from "../core/bytes.ts";

/** The address in its one checksummed spelling. @param address 0x and 40 hexadecimal digits, in any case */
export function checksummed(address: string): string {
  const digits = address.slice(2).toLowerCase();
  const hash = asBuffer(keccak_256(digits)).toString("hex");
  const spelled = [...digits].map((digit, at) => ((hash[at] ?? "0") >= "8" ? digit.toUpperCase() : digit));
  return `0x${spelled.join("")}`;
}
