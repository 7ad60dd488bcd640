// The network that tests pay on.
import { networkNamed } from "../../src/x402/network.ts";

export const BASE = networkNamed("base");
