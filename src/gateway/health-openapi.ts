// How the open paths are documented.
import { Type } from "@sinclair/typebox";
import { operation } from "../http/openapi.ts";

const status = Type.Object({ status: Type.String() });

export const health = operation({
  tag: ["Facilitator", "Service"],
  open: true,
  summary: "Health",
  description:
    "Of the gateway: liveness. The facilitator has the same path on both of its ports, and answers 503 there when it " +
    "could settle nothing.",
  responses: [{ status: "ok", description: "The process serves.", schema: status, example: { status: "ok" } }],
  errors: ["unavailable"],
  answers: {
    unavailable: {
      description:
        "Of the facilitator: no node of the chain answers, or its gas wallets are low. Of both: shutting down.",
      schema: Type.Object({ status: Type.Literal("unavailable"), reason: Type.String() }),
      example: { status: "unavailable", reason: "rpc unreachable" },
    },
  },
});

export const ready = operation({
  tag: "Service",
  open: true,
  summary: "Readiness",
  description: "Ready when the database takes a write within two seconds.",
  responses: [{ status: "ok", description: "Calls are accepted.", schema: status, example: { status: "ok" } }],
  errors: ["unavailable"],
});

export const version = operation({
  tag: "Service",
  open: true,
  summary: "Version",
  responses: [
    {
      status: "ok",
      description: "The version of the binary, and the commit it was built from.",
      schema: Type.Object({ version: Type.String(), commit: Type.Union([Type.String(), Type.Null()]) }),
      example: { version: "0.1.0", commit: "4f2a9c81d0be" },
    },
  ],
  errors: [],
});

export const jwks = operation({
  tag: "Service",
  open: true,
  summary: "Public keys",
  description: "The public signing keys, retired ones included, as a JSON Web Key Set (RFC 7517).",
  responses: [
    {
      status: "ok",
      description: "The keys.",
      schema: Type.Object({ keys: Type.Array(Type.Object({}, { additionalProperties: true })) }),
      example: { keys: [{ kty: "OKP", crv: "Ed25519", kid: "5f0c…", alg: "EdDSA", use: "sig", x: "11qY…" }] },
    },
  ],
  errors: [],
});
